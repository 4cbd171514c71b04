"""One call on the fleet: from the choice of an engine to the last chunk, whatever becomes of engines meanwhile.

Invariant: a call is given only to an engine that serves the fleet's version; a reply continued on another
engine, or after an update, consists of exactly the tokens that were sampled, each under the version that its
engine had. To the client it is one reply.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from areal_agent.config import RunConfig
from areal_agent.errors import EngineError
from areal_gateway.fleet.continuation import merge_spans, not_continuable, remaining, shifted
from areal_gateway.fleet.member import Member
from areal_gateway.fleet.protocol import EngineLost, computed
from areal_gateway.fleet.routing import Router
from areal_gateway.fleet.types import INTERRUPTED, Chunk, EngineSampling, FleetUnavailable, Span

if TYPE_CHECKING:
    from areal_gateway.fleet.fleet import Fleet

PREFILLED_AGAIN = ("kept", "resubmitted", "moved")
"""Why a prompt and what was sampled after it are computed a second time: its cache was dropped by an update
that it lived through, it was aborted for an update, or its engine was lost. A bound from above: prompts that
replies have in common are computed once for all of them."""

CONTINUATIONS = 5
"""Engines one call may lose before it fails."""


class CallRunner:
    """Runs the calls of one fleet.

    Attributes:
        prefilled_again: tokens that engines had to compute a second time, by cause; see PREFILLED_AGAIN.
    """

    def __init__(self, fleet: Fleet, config: RunConfig) -> None:
        self._fleet = fleet
        self._call_s = config.fleet.call_timeout_s
        self._hold_s = config.gateway.hold_timeout_s
        self._router = Router(config.fleet.max_num_seqs)
        self.prefilled_again: Counter[str] = Counter(dict.fromkeys(PREFILLED_AGAIN, 0))

    async def run(
        self,
        session_id: str,
        prompt_ids: Sequence[int],
        sampling: EngineSampling,
        on_engine: Callable[[str], None] | None,
    ) -> AsyncGenerator[Chunk]:
        """See Fleet.generate."""
        deadline = time.monotonic() + self._call_s + self._hold_s
        tokens: list[int] = []
        spans: list[Span] = []
        losses = 0
        while not tokens or len(tokens) < sampling.max_tokens:
            member = await self._acquire(session_id)
            done = len(tokens)
            if on_engine is not None:
                on_engine(member.id)
            part = sampling if not done else remaining(sampling, done)
            asked = prompt_ids if not done else [*prompt_ids, *tokens]
            finish: str | None = None
            timeout_s = max(0.0, min(self._call_s, deadline - time.monotonic()))
            member.calls += 1
            try:
                async with aclosing(member.client.generate(asked, part, timeout_s)) as stream:
                    async for chunk in stream:
                        tokens += chunk.token_ids
                        finish = chunk.finish_reason
                        if chunk.spans is not None:
                            spans = merge_spans(spans, shifted(chunk.spans, done))
                        if finish != INTERRUPTED:
                            yield chunk if chunk.spans is None else replace(chunk, spans=spans)
                        elif chunk.token_ids:
                            yield replace(chunk, finish_reason=None, spans=None)
                if finish != INTERRUPTED:
                    return
                cause = "resubmitted"
            except EngineLost as e:
                cause = "moved"
                losses += 1
                member.suspect.set()
                self._router.forget(session_id)
                if losses > CONTINUATIONS or time.monotonic() >= deadline:
                    raise
                if len(tokens) > done:
                    if e.spans is None:
                        raise EngineError(
                            f"{member.id} was lost during a reply that lived through an update, and does not "
                            f"count what it sampled; the versions of {len(tokens) - done} tokens are unknown"
                        ) from e
                    spans = merge_spans(spans, shifted(e.spans, done))
                self._fleet.emit_moved(session_id, member, len(tokens))
            finally:
                member.calls -= 1
            if tokens and (why := not_continuable(sampling)):
                raise EngineError(f"{member.id} ended a reply after {len(tokens)} tokens ({cause}); {why}")
            if tokens:
                self.prefilled_again[cause] += computed(len(prompt_ids), len(tokens))
        yield Chunk([], [], "length", spans)

    async def _acquire(self, session_id: str) -> Member:
        """Wait for an engine that serves. Between its choice and the request nothing else runs."""
        if not await self._fleet.wait_routable(self._hold_s):
            raise FleetUnavailable(f"no engine served within {self._hold_s:g} s: {self._fleet.why_not()}")
        return self._router.pick(session_id, self._fleet.routable())

    def count_kept(self, members: list[Member]) -> None:
        """These were suspended and go on under new weights."""
        self.prefilled_again["kept"] += sum(member.client.kept for member in members)
