"""Asks engines for a few sampled tokens, outside any session, so that the trainer can check what they hold.

Invariant: what is returned says which engine sampled it and under which version; nothing of it reaches the
ledger, and nothing of it is trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass

from areal_agent.errors import EngineError
from areal_gateway.fleet.engine import EngineLost
from areal_gateway.fleet.member import Member
from areal_gateway.fleet.types import EngineSampling


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """n sampled tokens of one engine: `token_ids` [n], `logprobs` [n], `versions` [n], after a prompt's ids."""

    engine: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float | None]
    versions: list[int]


async def probe(
    members: Iterable[Member], prompts: list[list[int]], sampling: EngineSampling, timeout_s: float
) -> list[ProbeReply]:
    """Every prompt on every engine. One that is lost meanwhile is left out: its supervisor sees to it.

    Raises EngineError when an engine refuses, or stamps fewer tokens than it sampled.
    """
    asked = [_ask(member, prompt, sampling, timeout_s) for member in members for prompt in prompts]
    return [reply for reply in await asyncio.gather(*asked) if reply is not None]


async def _ask(
    member: Member, prompt: list[int], sampling: EngineSampling, timeout_s: float
) -> ProbeReply | None:
    reply = ProbeReply(member.id, prompt, [], [], [])
    try:
        async with aclosing(member.client.generate(prompt, sampling, timeout_s)) as stream:
            async for chunk in stream:
                reply.token_ids.extend(chunk.token_ids)
                reply.logprobs.extend(chunk.logprobs)
                for start, end, version in chunk.spans or ():
                    reply.versions.extend([version] * (end - start))
    except EngineLost:
        member.suspect.set()
        return None
    if len(reply.versions) != len(reply.token_ids):
        raise EngineError(
            f"{member.id} sampled {len(reply.token_ids)} tokens and stamped {len(reply.versions)}"
        )
    return reply
