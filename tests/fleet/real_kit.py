"""What the tests on real engines share: one prompt, its replies, and the proof that their versions are true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import torch
from fleet_kit import Policies, run_config

from areal_agent.config import RunConfig
from areal_gateway.fleet import EngineSampling, Fleet

PROMPT = list(range(10, 30))
TOLERANCE = 1e-4
"""Nats, float32 on both sides; 2e-6 is usual. Old weights in one layer alone are 1e-2 and more off."""


Reply = tuple[list[int], torch.Tensor, list[tuple[int, int, int]]]


async def reply(fleet: Fleet, n: int = 40, session: str = "s", begun: asyncio.Event | None = None) -> Reply:
    """(ids [n], logprobs [n] in nats, spans) of a reply to PROMPT that is `n` tokens long, whatever it says.

    `begun` is set as soon as a token is there.
    """
    sampling = EngineSampling(max_tokens=n, temperature=1.0, extra={"ignore_eos": True})
    ids: list[int] = []
    logprobs: list[float] = []
    spans = None
    async with aclosing(fleet.generate(session_id=session, prompt_ids=PROMPT, sampling=sampling)) as stream:
        async for chunk in stream:
            ids += chunk.token_ids
            if ids and begun is not None:
                begun.set()
            logprobs += [x for x in chunk.logprobs if x is not None]
            spans = chunk.spans
    assert len(ids) == len(logprobs) == n
    assert spans is not None
    return ids, torch.tensor(logprobs), spans


@asynccontextmanager
async def traffic(fleet: Fleet, lanes: int = 8) -> AsyncIterator[list[Reply]]:
    """Replies on every lane, one after the other, until the block ends; yields where the ended ones are put.

    The block begins when each lane has a token: an update can be through before an engine decoded anything of a
    call that was only sent. It may take as long as it likes, for lanes go on, each with a length of its own: the
    engines are never paused between two replies of all lanes.
    """
    begun, over, ended = [asyncio.Event() for _ in range(lanes)], asyncio.Event(), list[Reply]()

    async def lane(i: int) -> None:
        while not over.is_set():
            ended.append(await reply(fleet, 300 + 50 * i, f"s{i}", begun[i]))

    async with asyncio.TaskGroup() as group:
        for i in range(lanes):
            group.create_task(lane(i))
        for event in begun:
            await event.wait()
        yield ended
        over.set()


def assert_exact(policies: Policies, ids: list[int], logprobs: torch.Tensor, spans: list) -> None:
    """Every token has the logprob that the version of its span gives it."""
    for start, end, version in spans:
        want = policies.logprobs(version, PROMPT, ids)[start:end]
        assert (logprobs[start:end] - want).abs().max() < TOLERANCE, f"span {start}..{end} is not v{version}"


def engine_config(model: Path) -> RunConfig:
    """One engine of `model`, and deadlines that a shared machine keeps."""
    config = run_config(
        fleet={
            "engines": 1,
            "start_timeout_s": 240,
            "max_model_len": 1024,
            "max_num_seqs": 32,
            "kv_cache_gib": 0.5,
            "call_timeout_s": 120,
        },
        weights={"join_timeout_s": 20, "transfer_timeout_s": 20, "pause_timeout_s": 20},
        gateway={"hold_timeout_s": 120},
    )
    config.model = str(model)
    return config
