"""The driver for servers that stamp nothing: vLLM before 0.32, and vllm-ascend 0.23.

Invariant: no request lives across a change of weights, so the version that its engine held when it was sent is
the version of all its tokens. A suspension sends nothing new, aborts what is in flight, and reads no token of
an aborted request afterwards; each of those replies ends as INTERRUPTED, and the fleet sends its prompt and what
came of it again. The version is what the worker extension says it loaded, asked of every worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from secrets import token_hex

from areal_agent.errors import EngineError
from areal_gateway.fleet.event import COMPLETIONS, GENERATE
from areal_gateway.fleet.http import EngineHTTP
from areal_gateway.fleet.protocol import EngineLost, EngineTimedOut
from areal_gateway.fleet.replies import Piece, completions_body, generate_body, pieces
from areal_gateway.fleet.types import INTERRUPTED, Chunk, EngineSampling, Span

GRACE_S = 0.5
"""How long aborted replies may take to bring their last tokens. A request that reached the engine after the
abort waits there for the resume and brings none: it is cut then."""


class _Flight:
    """A request in flight, sent under `version`; what came of it so far is `n` tokens."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.n = 0
        self.aborting = False
        self._over = False
        self._wait: asyncio.Timeout | None = None

    async def next(self, stream: AsyncGenerator[Piece]) -> Piece | None:
        """The next piece; None once it was cut."""
        if self._over:
            return None
        try:
            async with asyncio.timeout(None) as self._wait:
                return await anext(stream)
        except TimeoutError:
            if self._over:
                return None
            raise
        finally:
            self._wait = None

    def cut(self) -> None:
        self._over = True
        if self._wait is not None:
            self._wait.reschedule(asyncio.get_running_loop().time())


class ResubmitDriver(EngineHTTP):
    """See EngineDriver. `paths`: what the server serves."""

    kind = "resubmit"
    kept = 0

    def __init__(self, url: str, model: str | None, paths: frozenset[str]) -> None:
        super().__init__(url, model)
        self._path = GENERATE if GENERATE in paths else COMPLETIONS
        self._paths = paths
        self._version: int | None = None
        self._flights: set[_Flight] = set()
        self._going = asyncio.Event()
        self._going.set()
        self._landed = asyncio.Event()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: EngineSampling, timeout_s: float
    ) -> AsyncGenerator[Chunk]:
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self._going.wait()
        except TimeoutError:
            raise EngineTimedOut(f"engine {self.url} was suspended for {timeout_s:.0f} s") from None
        if self._version is None:
            raise EngineError(f"engine {self.url} was never given a version")
        if self._path == GENERATE:
            body = generate_body(self.model, prompt_ids, sampling, token_hex(16))
        else:
            body = completions_body(self.model, prompt_ids, sampling)
        flight = _Flight(self._version)
        self._flights.add(flight)
        left = max(0.01, timeout_s - (time.monotonic() - began))
        try:
            async with aclosing(pieces(self, self._path, body, left, sampling.top_logprobs)) as stream:
                while (piece := await flight.next(stream)) is not None:
                    flight.n += len(piece.token_ids)
                    finish = piece.finish_reason
                    if finish == "abort" and flight.aborting:
                        finish = INTERRUPTED
                    spans = None if finish is None else _one_span(flight)
                    yield Chunk(piece.token_ids, piece.logprobs, finish, spans, piece.top)
                    if finish is not None:
                        return
            yield Chunk([], [], INTERRUPTED, _one_span(flight))
        except EngineLost as e:
            e.spans = _one_span(flight)
            raise
        finally:
            self._flights.discard(flight)
            self._landed.set()

    async def suspend(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        self._going.clear()
        for flight in self._flights:
            flight.aborting = True
        if "/pause" in self._paths:
            await self.call("POST", "/pause", timeout_s, params={"mode": "abort"})
            await self._land(min(GRACE_S, end - time.monotonic()))
        for flight in list(self._flights):
            flight.cut()
        if "/pause" not in self._paths:
            # The pause would have done it.
            await self.call("POST", "/reset_prefix_cache", timeout_s)

    async def _land(self, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                while self._flights:
                    self._landed.clear()
                    await self._landed.wait()
        except TimeoutError:
            return  # the caller cuts what is left

    async def resume(self, timeout_s: float) -> None:
        if "/pause" in self._paths:
            await self.call("POST", "/resume", timeout_s)
        self._going.set()

    async def stamp(self, version: int, timeout_s: float) -> None:
        held = await self.held_version(timeout_s)
        if version >= 0 and (held or 0) != version:
            raise EngineError(f"{self.url} was given version {version} and its workers say they hold {held}")
        self._version = version

    async def held_version(self, timeout_s: float) -> int | None:
        said = {worker["holds"] for worker in await self.rpc("areal_status", {}, timeout_s)}
        if len(said) != 1:
            raise EngineError(f"the workers of engine {self.url} hold different versions: {said}")
        held = said.pop()
        return held if isinstance(held, int) else None  # half new is no version


def _one_span(flight: _Flight) -> list[Span]:
    return [(0, flight.n, flight.version)] if flight.n else []
