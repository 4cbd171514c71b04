"""The engines: starting them, routing calls to them, and giving them new weights."""

from areal_gateway.fleet.fleet import Fleet
from areal_gateway.fleet.types import (
    Chunk,
    EngineSampling,
    EngineState,
    FleetUnavailable,
    Span,
    UnknownEngine,
)
from areal_gateway.fleet.weights import WeightConflict, WeightTransaction

__all__ = [
    "Chunk",
    "EngineSampling",
    "EngineState",
    "Fleet",
    "FleetUnavailable",
    "Span",
    "UnknownEngine",
    "WeightConflict",
    "WeightTransaction",
]
