"""What the fleet asks of an engine, whatever its server can do: one protocol, and the ways in which it fails.

Invariant: a reply either ends with a chunk that has a finish reason and spans over every output token, or
raises; a reply that was cut is never taken for a whole one. Every request has a deadline.

Two drivers keep it. `spans` (vLLM from 0.32 on) lets requests live through a new version and reads from the
engine which token is whose. `resubmit` (older servers) lets none live through: a suspension ends them all as
INTERRUPTED, and the fleet sends prompt and partial reply again once the new version is live.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from areal_agent.errors import EngineError
from areal_gateway.fleet.types import Chunk, EngineSampling, Span


class EngineLost(EngineError):
    """The connection failed or was cut, or a reply failed by the engine's fault (a status of 500 or more):
    the engine died, or is about to be found dead.

    Attributes:
        spans: over the tokens of the reply that had come, where their versions are certain; else None.
    """

    def __init__(self, message: str, spans: list[Span] | None = None) -> None:
        super().__init__(message)
        self.spans = spans


class EngineTimedOut(EngineError):
    """A reply was not whole in time: the engine is busy, or paused. It lives."""


class EngineRefused(EngineError):
    """The engine answered with an error; it lives, and the same request would be refused again.

    Attributes:
        status: HTTP status of the answer, or the code of an error inside a stream: vLLM streams even a
            prompt that is too long (400) as an event of a 200. For a reply it is below 500.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def computed(prompt: int, sampled: int) -> int:
    """Tokens that a reply has in the engine's cache: the prompt and what was sampled, the last token apart,
    which the next step reads. Before the first token nobody knows how much of the prompt it is: 0."""
    return prompt + sampled - 1 if sampled else 0


class EngineDriver(Protocol):
    """One engine. Methods raise EngineError; a `timeout_s` is the whole of what a method may take."""

    kind: str
    """`spans` or `resubmit`."""
    url: str
    model: str | None
    kept: int
    """Tokens whose cache the last suspension dropped and whose replies go on after it: `computed` of each."""

    def generate(
        self, prompt_ids: Sequence[int], sampling: EngineSampling, timeout_s: float
    ) -> AsyncGenerator[Chunk]:
        """Stream one reply. Closing the iterator closes the request, and the engine drops the work.

        Raises:
            EngineLost: connection failed, the stream ended early, or the engine failed (500 or more).
            EngineRefused: the engine refused the request.
            EngineTimedOut: it took longer than `timeout_s`.
            EngineError: it broke the protocol.
        """
        ...

    async def suspend(self, timeout_s: float) -> None:
        """Before a new version is loaded: after this no token is sampled until `resume`, and no cache of the
        old version is used again."""
        ...

    async def resume(self, timeout_s: float) -> None: ...

    async def stamp(self, version: int, timeout_s: float) -> None:
        """What is sampled from now on is of `version`. Raises EngineError where the engine, asked again,
        says otherwise."""
        ...

    async def held_version(self, timeout_s: float) -> int | None:
        """The version that the engine says it holds; None: it was never given one."""
        ...

    async def health(self, timeout_s: float) -> None: ...

    async def model_name(self, timeout_s: float) -> str: ...

    async def world_size(self, timeout_s: float) -> int: ...

    async def rpc(self, method: str, arg: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Call a method of the worker extension; one result per worker. Raises EngineError for {error}."""
        ...

    async def close(self) -> None:
        """Close every connection; calls in flight are cut and end as EngineLost."""
        ...
