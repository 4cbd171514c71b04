"""The observer: an OpenAI-compatible gateway that records what the engines sampled, to the token."""
