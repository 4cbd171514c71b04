"""Asks engines for a few sampled tokens, outside any session, so that the trainer can check what they hold.

Invariant: what is returned says which engine sampled it and under which version; nothing of it reaches the
ledger, and nothing of it is trained. An engine that is too busy to answer is left out, and is no error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from areal_agent.errors import EngineError
from areal_gateway.fleet.member import Member
from areal_gateway.fleet.protocol import EngineLost, EngineTimedOut
from areal_gateway.fleet.types import INTERRUPTED, EngineSampling

PROBE_S = 10.0
"""A probe queues behind the calls, and the trainer waits for it: an engine that needs longer is left out."""


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """n sampled tokens of one engine: `token_ids` [n], `logprobs` [n], `versions` [n], after a prompt's ids."""

    engine: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float | None]
    versions: list[int]


async def probe(
    members: Iterable[Member],
    prompts: list[list[int]],
    sampling: EngineSampling,
    on_left_out: Callable[[Member, str], None],
) -> list[ProbeReply]:
    """Every prompt on every engine. One that is busy or lost is left out, and `on_left_out` is told why;
    a lost one is suspected, and its supervisor sees to it.

    Raises EngineError when an engine refuses, or stamps fewer tokens than it sampled.
    """
    asked = [_ask_all(member, prompts, sampling, on_left_out) for member in members]
    return [reply for replies in await asyncio.gather(*asked) for reply in replies]


async def _ask_all(
    member: Member,
    prompts: list[list[int]],
    sampling: EngineSampling,
    on_left_out: Callable[[Member, str], None],
) -> list[ProbeReply]:
    """A reply to every prompt, or none at all."""
    asked = [_ask(member, prompt, sampling) for prompt in prompts]
    replies: list[ProbeReply] = []
    left_out: EngineError | None = None
    for outcome in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(outcome, ProbeReply):
            replies.append(outcome)
        elif isinstance(outcome, EngineLost | EngineTimedOut):
            left_out = outcome
            if isinstance(outcome, EngineLost):
                member.suspect.set()
        else:
            raise outcome
    if left_out is None:
        return replies
    busy = isinstance(left_out, EngineTimedOut)
    on_left_out(member, f"it did not answer within {PROBE_S:g} s" if busy else str(left_out))
    return []


async def _ask(member: Member, prompt: list[int], sampling: EngineSampling) -> ProbeReply:
    reply = ProbeReply(member.id, prompt, [], [], [])
    async with aclosing(member.client.generate(prompt, sampling, PROBE_S)) as stream:
        async for chunk in stream:
            reply.token_ids.extend(chunk.token_ids)
            reply.logprobs.extend(chunk.logprobs)
            if chunk.finish_reason == INTERRUPTED:
                raise EngineTimedOut(f"{member.id} was given new weights during the probe")
            for start, end, version in chunk.spans or ():
                reply.versions.extend([version] * (end - start))
    if len(reply.versions) != len(reply.token_ids):
        raise EngineError(
            f"{member.id} sampled {len(reply.token_ids)} tokens and stamped {len(reply.versions)}"
        )
    return reply
