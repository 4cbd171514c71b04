"""The driver for servers that stamp every token: vLLM from 0.32 on.

Invariant: requests live through a new version, and which version sampled which token is what the engine says,
never a guess. It says so twice: on the last chunk of a reply, for all of it; and, while it is suspended, how
many tokens it has sampled of each request it holds. The second lets the versions of a reply be known when its
engine dies before the last chunk. Where both are there and differ, the last chunk counts, and the second is
not trusted again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

from areal_agent.errors import EngineError
from areal_gateway.fleet.event import GENERATE
from areal_gateway.fleet.http import EngineHTTP
from areal_gateway.fleet.protocol import EngineLost, EngineRefused, computed
from areal_gateway.fleet.replies import generate_body, pieces
from areal_gateway.fleet.types import Chunk, EngineSampling, Span

log = logging.getLogger(__name__)

OUR_ID = re.compile(r"[0-9a-f]{32}")
"""The request id that we gave, inside the one that vLLM makes of it."""


@dataclass(eq=False)
class _Flight:
    """A request in flight: tokens that came, and the token counts at which its version changed."""

    version: int | None
    prompt: int
    n: int = 0
    sampled: int | None = None
    """Tokens the engine had sampled of it at the last suspension; None: it did not hold it then."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    certain: bool = True

    def spans(self) -> list[Span] | None:
        """Over the tokens that came."""
        if not self.certain or self.version is None:
            return None
        out: list[Span] = []
        start, version = 0, self.version
        for at, following in [*self.marks, (self.n, self.version)]:
            end = min(at, self.n)
            if end > start:
                out.append((start, end, version))
                start = end
            version = following
        return out


class SpansDriver(EngineHTTP):
    """See EngineDriver."""

    kind = "spans"

    def __init__(self, url: str, model: str | None) -> None:
        super().__init__(url, model)
        self._version: int | None = None
        self.kept = 0
        self._flights: dict[str, _Flight] = {}
        self._counts = True
        """Whether the engine's counts of sampled tokens are there and were never found wrong."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: EngineSampling, timeout_s: float
    ) -> AsyncGenerator[Chunk]:
        id = token_hex(16)
        body = generate_body(self.model, prompt_ids, sampling, id)
        flight = self._flights[id] = _Flight(self._version, len(prompt_ids))
        try:
            async with aclosing(pieces(self, GENERATE, body, timeout_s, sampling.top_logprobs)) as stream:
                async for piece in stream:
                    flight.n += len(piece.token_ids)
                    spans = None
                    if piece.finish_reason is not None:
                        spans = self._stamped(piece.weight_versions, flight)
                    yield Chunk(piece.token_ids, piece.logprobs, piece.finish_reason, spans, piece.top)
        except EngineLost as e:
            e.spans = flight.spans()
            raise
        finally:
            del self._flights[id]

    def _stamped(self, raw: list[dict[str, Any]], flight: _Flight) -> list[Span]:
        """The engine's own word on a whole reply. Raises EngineError when it does not cover it."""
        spans: list[Span] = []
        at = 0
        for span in raw:
            try:
                version = int(span["version"])
            except ValueError:
                raise EngineError(
                    f"engine {self.url} stamps version {span['version']!r}, not a number: it was never given one"
                ) from None
            if span["start"] != at or span["end"] <= at:
                break
            at = span["end"]
            if spans and spans[-1][2] == version:
                spans[-1] = (spans[-1][0], at, version)
            else:
                spans.append((span["start"], at, version))
        if at != flight.n:
            raise EngineError(f"engine {self.url} gave spans {raw} for {flight.n} tokens")
        if self._counts and (counted := flight.spans()) is not None and counted != spans:
            log.warning(
                "engine %s counted %s and stamped %s; its counts are not used", self.url, counted, spans
            )
            self._distrust()
        return spans

    def _distrust(self) -> None:
        self._counts = False
        for flight in self._flights.values():
            flight.certain = flight.certain and not flight.marks

    async def suspend(self, timeout_s: float) -> None:
        await self.call("POST", "/pause", timeout_s, params={"mode": "keep"})
        try:
            progress = (await self.rpc("areal_progress", {}, timeout_s))[0]
        except EngineRefused:  # an extension of an older gateway, in an engine that we were attached to
            progress = {"sampled": None}
        if progress["sampled"] is None:
            self._distrust()
        sampled = {m[0]: n for key, n in (progress["sampled"] or {}).items() if (m := OUR_ID.search(key))}
        for id, flight in self._flights.items():
            flight.sampled = sampled.get(id)
        flights = self._flights.values()
        self.kept = sum(computed(f.prompt, (f.sampled or 0) if self._counts else f.n) for f in flights)

    async def resume(self, timeout_s: float) -> None:
        await self.call("POST", "/resume", timeout_s)

    async def stamp(self, version: int, timeout_s: float) -> None:
        await self.call("POST", "/update_weight_version", timeout_s, json={"new_version": str(version)})
        said = await self._label(timeout_s)
        if said != str(version):
            raise EngineError(f"{self.url} was given version {version} and reads back {said!r}")
        if version == self._version:
            return
        self._version = version
        for flight in self._flights.values():
            if not self._counts:
                flight.certain = False
            elif flight.sampled is not None:
                flight.marks.append((flight.sampled, version))
            elif not flight.n:
                # Not in the engine's hands at the pause, and nothing came until now: it had not begun.
                flight.marks.append((0, version))
            # Otherwise it ended before the pause, and what still comes of it is old.

    async def held_version(self, timeout_s: float) -> int | None:
        label = await self._label(timeout_s)  # "default" until somebody sets it
        return int(label) if label.lstrip("-").isdecimal() else None

    async def _label(self, timeout_s: float) -> str:
        return str((await self.call("GET", "/weight_info", timeout_s))["weight_version"])
