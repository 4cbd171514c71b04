"""areal_agent: train an agent that already exists."""
