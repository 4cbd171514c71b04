"""Thin adapters, one file per agent framework; each needs `areal_agent` only."""
