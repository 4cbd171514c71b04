"""Invariant 9: η = 0 equals synchronous RL, token for token, on fixed seeds.

The real gateway and fleet in front of a fake engine whose tokens depend on version, seed and prompt. The
oracle is synchronous RL written out as a loop: one session after the other, then a step, then the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from fakes.engine import FakeEngine
from fakes.receivers import simulated_checksums
from openai import AsyncOpenAI
from small_folder import build_folder

from areal_agent import wire
from areal_agent.agents import AgentRunner
from areal_agent.config import RunConfig
from areal_agent.controller import RolloutController, session_seed
from areal_agent.dataset import load, passes
from areal_agent.episode import EpisodeRunner
from areal_agent.observe import bind, client_environment, observe, unobserve
from areal_agent.rewards import RewardRunner
from areal_agent.session import GatewayClient
from areal_agent.trajectory import Batch
from areal_agent.weights import plan
from areal_gateway.app import create_app
from areal_gateway.fleet import Fleet
from areal_gateway.ledger import Ledger
from areal_gateway.serving import GatewayRunner
from areal_gateway.tokens import Tokens

ADMIN = "admin"
GROUPS, SIZE, STEPS, SEED = 3, 2, 3, 11
ITEMS = load([{"q": f"question {i}"} for i in range(5)])
MANIFEST = plan([("w", "float32", (4,))], 64)


def settings(eta: int, engine: FakeEngine, model: Path) -> RunConfig:
    return RunConfig.parse(
        {
            "model": str(model),
            "sampling": {"seed": SEED, "max_tokens": 12},
            "rollout": {"groups_per_step": GROUPS, "group_size": SIZE, "max_staleness": eta, "seed": SEED},
            "trainer": {"steps": STEPS},
            "fleet": {"attach": [engine.url], "start_timeout_s": 20, "call_timeout_s": 20},
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_folder(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def gateway(folder: Path, eta: int, model: Path) -> AsyncIterator[tuple[RunConfig, GatewayClient]]:
    """A gateway on a loopback port, its fleet attached to one fake engine."""
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine(vocab=200))
        config = settings(eta, engine, model)
        ledger = Ledger(folder / "ledger.sqlite")
        stack.callback(ledger.close)
        fleet = Fleet(config, folder, lambda event: None)
        await fleet.start()
        stack.push_async_callback(fleet.stop)
        tokens = Tokens.load(model, config.gateway)
        app = create_app(config=config, fleet=fleet, ledger=ledger, tokens=tokens, admin_key=ADMIN)
        runner = GatewayRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        observe()
        stack.callback(unobserve)
        stack.enter_context(client_environment(url))
        shared_client.cache_clear()  # a client belongs to one event loop
        yield config, await stack.enter_async_context(GatewayClient(url, ADMIN))


async def step(client: GatewayClient, version: int, eta: int) -> Batch:
    """What the trainer does with one batch: lease it, push version + 1, confirm."""
    body = {"groups": GROUPS, "max_staleness": eta, "wait_s": 20, "lease_s": 60}
    headers = {"authorization": f"Bearer {ADMIN}"}
    async with httpx.AsyncClient(base_url=client.url, headers=headers, timeout=30) as http:
        leased = await http.post("/admin/trajectories/lease", json=body)
    assert leased.status_code == 200, leased.text
    batch = wire.unpack(leased.content)
    begin: dict[str, Any] = {
        "version": version + 1,
        "backend": "gloo",
        "store": {"host": "127.0.0.1", "port": 1},
    }
    begin["manifest"] = MANIFEST.model_dump(mode="json")
    begun = await client.post("/admin/weights/begin", begin, repeat=False)
    sums = simulated_checksums(version + 1, len(MANIFEST.buckets))
    done = await client.post(
        "/admin/weights/commit", {"update_id": begun["update_id"], "checksums": sums}, repeat=False
    )
    assert done["version"] == version + 1
    await client.post("/admin/trajectories/ack", {"lease_id": batch.lease_id}, repeat=True)
    return batch


@functools.cache
def shared_client() -> AsyncOpenAI:
    """One for all sessions: which one a request belongs to is the context's business."""
    return AsyncOpenAI()


async def agent(task):
    """Two turns, the second depending on what was said in the first."""
    messages: list[Any] = [{"role": "user", "content": task["q"]}]
    for _ in range(2):
        reply = await shared_client().chat.completions.create(model="policy", messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        messages.append({"role": "user", "content": "go on"})
    return "".join(m["content"] for m in messages)


def reward(task, result):
    return float(len(result) % 7)


async def asynchronous(folder: Path, eta: int, model: Path) -> list[Batch]:
    async with gateway(folder, eta, model) as (config, client):
        episodes = EpisodeRunner(
            client, AgentRunner(agent), RewardRunner(reward, 10), session_timeout_s=60, reward_timeout_s=10
        )
        controller = RolloutController(episodes, config)
        rollouts = asyncio.create_task(controller.train(ITEMS))
        batches = []
        for version in range(STEPS):
            batches.append(await step(client, version, eta))
            controller.see_version(version + 1)
        await rollouts
        return batches


async def synchronous(folder: Path, model: Path) -> list[Batch]:
    async with gateway(folder, 0, model) as (_, client):
        tasks, batches, number = passes(ITEMS, SEED), [], itertools.count()
        for version in range(STEPS):
            for _ in range(GROUPS):
                item, n = next(tasks), next(number)
                for member in range(SIZE):
                    session = await client.open_session(
                        item.task_id,
                        group_id=f"group-{n}",
                        group_size=SIZE,
                        sampling={"seed": session_seed(SEED, n, member)},
                    )
                    with bind(session.base_url, session.api_key):
                        result = await agent(item.task)
                    await session.reward(reward(item.task, result))
                    await session.seal()
            batches.append(await step(client, version, 0))
        return batches


def folder_of(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def content(batches: list[Batch]) -> list[list[tuple]]:
    """Everything the trainer sees, but for names made anew in each run."""
    columns = ("task_id", "token_ids", "versions", "loss_mask", "logprobs", "temperature", "reward")
    return [
        sorted(tuple(v if not isinstance(v := getattr(s, c), list) else tuple(v) for c in columns) for s in b.sequences)
        for b in batches
    ]  # fmt: skip


async def test_eta_0_equals_synchronous_rl_token_for_token(tmp_path, model):
    ours = await asynchronous(folder_of(tmp_path, "a"), 0, model)
    theirs = await synchronous(folder_of(tmp_path, "b"), model)
    assert content(ours) == content(theirs)
    for version, batch in enumerate(ours):
        assert {v for s in batch.sequences for v, m in zip(s.versions, s.loss_mask, strict=True) if m} == {
            version
        }
        assert len({s.group_id for s in batch.sequences}) == GROUPS
        assert batch.staleness() == 0
    sampled = [
        tuple(t for t, m in zip(s.token_ids, s.loss_mask, strict=True) if m) for s in ours[0].sequences
    ]
    assert len(set(sampled)) > 1, "sessions of a group are sampled apart"


async def test_eta_1_is_not_synchronous_which_shows_that_the_comparison_can_fail(tmp_path, model):
    ours = await asynchronous(folder_of(tmp_path, "a"), 1, model)
    theirs = await synchronous(folder_of(tmp_path, "b"), model)
    assert content(ours) != content(theirs)
    assert ours[0].staleness() == 0
    assert max(b.staleness() for b in ours) == 1
