"""The engines: starting them, routing calls to them, and giving them new weights."""

from areal_gateway.fleet.types import Chunk, EngineSampling, Span

__all__ = ["Chunk", "EngineSampling", "Span"]
