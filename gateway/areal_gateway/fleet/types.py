"""What the gateway's core and its fleet say to each other about one call.

Invariant: `len(token_ids) == len(logprobs)` in every Chunk, and over the whole reply the spans of the
last chunk cover the output tokens exactly once, in order: `spans[0].start == 0`, each span starts where
the one before ended, and the last ends at the number of tokens. Versions are what the engine stamped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from areal_agent.errors import EngineError

INTERRUPTED = "interrupted"
"""Finish reason of a part of a reply that a weight update ended; the fleet goes on with it, and nobody else
ever sees this."""

Span = tuple[int, int, int]
"""(start, end, version): output tokens [start, end) were sampled under that policy version."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a reply, as it leaves the engine.

    `token_ids` [n], `logprobs` [n] (None where the engine gave none: the call is then incomplete).
    `finish_reason` ("stop", "length", "abort", or a driver's INTERRUPTED) and `spans` (over all output tokens of
    the reply, not of the chunk) are given on the last chunk only. `top` [n], where it was asked for: the
    likeliest tokens at each position, (token id, logprob), the likeliest first.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    finish_reason: str | None = None
    spans: list[Span] | None = None
    top: list[list[tuple[int, float]]] | None = None

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"chunk has {len(self.token_ids)} tokens and {len(self.logprobs)} logprobs")


@dataclass(frozen=True, slots=True)
class EngineSampling:
    """How the engine samples one reply. `stop` strings and `stop_token_ids` end it; top_k 0 keeps all.

    `top_logprobs`: how many of the likeliest tokens to tell at each position.

    `extra` is passed to the engine's sampling_params as it is (min_tokens, ignore_eos, logit_bias, ...)
    and may not override a field named here.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    top_logprobs: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


class EngineState(StrEnum):
    """Where an engine is in its life."""

    STARTING = "starting"
    """Its process is coming up, or it is up and waits for the current weights."""
    SERVING = "serving"
    """Holds the fleet's version, says so, and takes calls."""
    DRAINING = "draining"
    """Takes no new calls; those it has go on."""
    QUARANTINED = "quarantined"
    """Failed a probe or an update; it is being ended and takes no part in anything."""
    GONE = "gone"
    """Its process ended, or its address no longer answers."""


class UnknownEngine(EngineError):
    """No engine of the fleet has that id or address."""


class FleetUnavailable(EngineError):
    """No engine served within gateway.hold_timeout_s; to the agent a 503 it may retry."""
