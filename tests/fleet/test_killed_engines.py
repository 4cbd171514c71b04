"""An engine is killed every 20 seconds while calls run and weights change: every call completes, exactly."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from fakes.sender import Sender
from fleet_kit import Policies, until
from real_kit import PROMPT, assert_exact, engine_config

from areal_agent.errors import WeightUpdateError
from areal_gateway.fleet import EngineSampling, EngineState, Fleet

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

KILL_EVERY_S = 20.0
UPDATE_EVERY_S = 10.0
CALLERS = 12


async def call(fleet: Fleet, session: str, n: int):
    ids: list[int] = []
    logprobs: list[float | None] = []
    engines: list[str] = []
    finish = spans = None
    stream = fleet.generate(
        session_id=session,
        prompt_ids=PROMPT,
        sampling=EngineSampling(max_tokens=n, temperature=1.0, extra={"ignore_eos": True}),
        on_engine=engines.append,
    )
    async with aclosing(stream):
        async for chunk in stream:
            ids += chunk.token_ids
            logprobs += chunk.logprobs
            finish, spans = chunk.finish_reason, chunk.spans
    assert (finish, len(ids), len(logprobs)) == ("length", n, n)
    assert spans is not None
    assert None not in logprobs
    return ids, torch.tensor(logprobs), spans, engines


async def trainer(fleet: Fleet, policies: Policies) -> None:
    """Pushes a new version now and then, and the current one whenever an engine waits for it."""
    sender, due = Sender(timeout_s=20), time.monotonic() + UPDATE_EVERY_S
    tensors = policies.tensors(0)
    while True:
        await asyncio.sleep(0.5)
        new = time.monotonic() >= due
        if not new and not fleet.status()["needs_weights"]:
            continue
        version = fleet.version + new
        tensors = await asyncio.to_thread(policies.tensors, version)
        try:
            await sender.push(fleet.weights, version, tensors)
        except (WeightUpdateError, RuntimeError):  # an engine was killed meanwhile; offered again
            sender.leave()
        due = time.monotonic() + UPDATE_EVERY_S if new else due


@pytest.mark.parametrize("seconds", [90, 300])
async def test_every_call_completes_while_engines_are_killed(
    models: dict[str, Path], tmp_path: Path, seconds: int
) -> None:
    config = engine_config(models["tied"])
    config.fleet.engines, config.fleet.max_restarts = 2, 1000
    config.fleet.call_timeout_s = config.gateway.hold_timeout_s = 240
    events: list[dict] = []
    fleet = Fleet(config, tmp_path, events.append)
    await fleet.start()
    policies = Policies(models["tied"])
    rng = random.Random(0)
    replies: list[tuple] = []
    end = time.monotonic() + seconds
    kills = 0

    async def caller(i: int) -> None:
        while time.monotonic() < end:
            replies.append(await call(fleet, f"s{i}", rng.randrange(50, 900)))

    pushing = asyncio.create_task(trainer(fleet, Policies(models["tied"])))
    try:
        async with asyncio.TaskGroup() as group:
            for i in range(CALLERS):
                group.create_task(caller(i))
            while time.monotonic() < end - KILL_EVERY_S / 2:
                await asyncio.sleep(KILL_EVERY_S)
                # Killing one that has not come up yet would only keep it from coming up.
                await until(lambda: any(m.state is EngineState.SERVING for m in fleet.members), 180)
                victim = rng.choice([m for m in fleet.members if m.state is EngineState.SERVING])
                assert victim.process is not None
                os.kill(victim.process.pid, signal.SIGKILL)
                kills += 1
        assert not pushing.done(), pushing.exception()
    finally:
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)
        await fleet.stop()
    moved = [r for r in replies if len(r[3]) > 1]
    both = [r for r in moved if len(r[2]) > 1]
    print(
        f"{seconds} s: {kills} kills, {len(replies)} calls complete, {len(moved)} moved, {len(both)} of those of "
        f"several versions, {fleet.version} updates, prefilled again {dict(fleet.calls.prefilled_again)}"
    )
    assert kills >= 3
    assert moved
    for ids, logprobs, spans, _ in [*both, *moved, *rng.sample(replies, min(20, len(replies)))][:60]:
        assert_exact(policies, ids, logprobs, spans)
