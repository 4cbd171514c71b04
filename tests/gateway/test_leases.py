"""Leases: which groups, in what order, and never staler than η."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from gateway_support import ADMIN_KEY, Reply, Served, eventually, make_app
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agent.trajectory import Batch
from areal_agent.wire import MEDIA_TYPE, pack, unpack
from areal_gateway import admin, leases
from areal_gateway.groups import Group, choose
from areal_gateway.records import Outcome, SealRecord
from areal_gateway.tokens import Tokens

ASK = {"messages": [{"role": "user", "content": "What is two plus three?"}]}


def seal_of(session_id: str, version: int, reward: float | None = 1.0, tokens: int = 3) -> SealRecord:
    return SealRecord(session_id, Outcome.FINISHED, None, reward, tokens, version, 0, 0.0)


# -- the rule, simulated ---------------------------------------------------------------------------


@given(
    eta=st.integers(0, 3),
    batch=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
    steps=st.integers(1, 12),
)
@settings(max_examples=300, deadline=None)
def test_staleness_never_exceeds_eta_for_any_order_of_completion(
    eta: int, batch: int, order: Any, steps: int
) -> None:
    """Admission: running + accepted <= (eta + version + 1) * batch. Groups end in any order at any time."""
    version, admitted, consumed = 0, 0, 0
    groups: list[Group] = []
    starved = 0
    while version < steps:
        while admitted + 1 <= (eta + version + 1) * batch and order.random() < 0.7:
            groups.append(Group(f"g{admitted}", 1, admitted, version, [f"s{admitted}"]))
            admitted += 1
        running = [g for g in groups if not g.closed]
        if running and order.random() < 0.6:
            g = order.choice(running)
            g.seals[g.session_ids[0]] = seal_of(g.session_ids[0], g.opened_version)
        choice = choose(groups, want=batch, max_staleness=eta, version=version)
        if not choice.groups:
            assert choice.waiting_for
            starved += 1
            assert starved < 10_000, f"nothing can be leased any more: {choice.waiting_for}"
            continue
        starved = 0
        assert len(choice.groups) == batch
        assert [g.admitted for g in choice.groups] == sorted(g.admitted for g in choice.groups)
        assert max(version - g.oldest_version for g in choice.groups) <= eta
        for g in choice.groups:
            groups.remove(g)
        consumed += batch
        version += 1
    assert consumed == steps * batch


def group(i: int, version: int, *, ready: bool = True, leased: bool = False) -> Group:
    g = Group(f"g{i}", 1, i, version, [f"s{i}"], lease_id="l" if leased else None)
    if ready:
        g.seals[f"s{i}"] = seal_of(f"s{i}", version)
    return g


def names(*groups: Group, want: int, eta: int | None, version: int) -> list[str]:
    return [g.group_id for g in choose(list(groups), want=want, max_staleness=eta, version=version).groups]


def test_the_oldest_admitted_come_first() -> None:
    assert names(group(2, 0), group(0, 0), group(1, 0), want=2, eta=None, version=0) == ["g0", "g1"]


def test_too_few_are_waited_for() -> None:
    assert names(group(0, 0), want=2, eta=None, version=0) == []


def test_a_straggler_that_would_exceed_eta_is_waited_for() -> None:
    late = group(0, 0, ready=False)
    assert names(late, group(1, 1), group(2, 1), want=2, eta=1, version=1) == []
    assert names(late, group(1, 0), group(2, 0), want=2, eta=1, version=0) == ["g1", "g2"]
    assert names(late, group(1, 1), group(2, 1), want=2, eta=None, version=1) == ["g1", "g2"]


def test_due_groups_are_taken_even_when_they_are_more_than_asked_for() -> None:
    assert names(group(0, 0), group(1, 0), group(2, 1), want=1, eta=1, version=1) == ["g0", "g1"]


def test_the_young_may_not_overtake_so_many_old_that_a_later_batch_cannot_hold_them() -> None:
    """η = 1, two a batch, version 0: five groups of version 0 would leave three for version 1."""
    old = [group(i, 0, ready=i < 2) for i in range(4)]
    assert names(*old, want=2, eta=1, version=0) == ["g0", "g1"]
    young = [group(i, 1) for i in range(4, 6)]
    slow = [group(i, 0, ready=False) for i in range(2)]
    assert names(*slow, *young, want=2, eta=2, version=1) == ["g4", "g5"]
    slower = [group(i, 0, ready=False) for i in range(3)]
    assert names(*slower, *young, want=2, eta=2, version=1) == []


def test_what_is_leased_is_neither_taken_nor_waited_for() -> None:
    assert names(group(0, 0, leased=True), group(1, 1), want=1, eta=1, version=1) == ["g1"]


# -- over HTTP -------------------------------------------------------------------------------------


async def lease(served: Served, groups: int = 1, status: int = 200, **fields: Any) -> Any:
    body = {"groups": groups, "max_staleness": None, "wait_s": 0.0, "lease_s": 60.0, **fields}
    raw = await served.admin("POST", "/admin/trajectories/lease", body, status)
    return unpack(raw) if status == 200 else None


async def run_group(served: Served, group_id: str, rewards: list[float | None], turns: int = 1) -> list[Any]:
    sessions = []
    for reward in rewards:
        session = await served.open(group_id=group_id, group_size=len(rewards))
        for _ in range(turns):
            await served.post(session, ASK)
        await served.seal(session, reward=reward)
        sessions.append(session)
    return sessions


async def test_a_lease_holds_whole_groups_token_for_token(served: Served) -> None:
    sessions = await run_group(served, "g", [1.0, 0.0])
    batch = await lease(served)
    assert [s.session_id for s in batch.sequences] == [s["session_id"] for s in sessions]
    assert [s.reward for s in batch.sequences] == [1.0, 0.0]
    for s, asked in zip(batch.sequences, served.fleet.asked, strict=True):
        assert s.token_ids == asked.prompt_ids + asked.output_ids
        assert sum(s.loss_mask) == len(asked.output_ids)
        assert s.temperature == 1.0
        assert s.group_id == "g"


async def test_a_session_without_a_reward_is_missing_not_zero(served: Served) -> None:
    await run_group(served, "g", [1.0, None])
    batch = await lease(served)
    assert [s.reward for s in batch.sequences] == [1.0, None]


async def test_a_group_is_ready_when_its_last_session_is_sealed(served: Served) -> None:
    first = await served.open(group_id="g", group_size=2)
    second = await served.open(group_id="g", group_size=2)
    for session in (first, second):
        await served.post(session, ASK)
    await served.seal(first, reward=1.0)
    await lease(served, status=204)
    waiting = asyncio.create_task(lease(served, wait_s=5.0))
    await asyncio.sleep(0.05)
    await served.seal(second, reward=1.0)
    assert len((await waiting).sequences) == 2


@pytest.mark.parametrize("rewards", [[None, None], []])
async def test_a_group_without_reward_or_tokens_is_void(served: Served, rewards: list[Any]) -> None:
    if rewards:
        await run_group(served, "g", rewards)
    else:
        await served.seal(await served.open(group_id="g", group_size=1), reward=1.0)
    await lease(served, status=204)
    assert (await served.admin("GET", "/admin/status"))["groups"]["void"] == 1


async def test_evaluation_is_never_leased(served: Served) -> None:
    session = await served.open(purpose="eval")
    await served.post(session, ASK)
    await served.seal(session, reward=1.0)
    await lease(served, status=204)


async def test_ack_consumes_once_and_for_all(served: Served) -> None:
    await run_group(served, "g", [1.0])
    batch = await lease(served)
    await lease(served, status=204)
    for _ in range(2):
        await served.admin("POST", "/admin/trajectories/ack", {"lease_id": batch.lease_id})
    assert (await served.admin("GET", "/admin/status"))["groups"] == {
        "open": 0,
        "ready": 0,
        "leased": 0,
        "consumed": 1,
        "void": 0,
    }
    await lease(served, status=204)


async def test_a_trainer_that_leaves_before_it_has_the_batch_gives_it_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing, go_on = threading.Event(), threading.Event()

    def slow(batch: Batch) -> bytes:
        packing.set()
        go_on.wait(5)
        return pack(batch)

    await run_group(served, "g", [1.0])
    monkeypatch.setattr(admin, "pack", slow)
    trainer = asyncio.create_task(lease(served))
    await eventually(packing.is_set)
    assert served.gateway.leases.counts()["leased"] == 1
    trainer.cancel()
    await eventually(lambda: served.gateway.leases.counts()["ready"] == 1)
    go_on.set()
    assert len((await lease(served)).sequences) == 1


async def test_a_nack_gives_the_groups_back(served: Served) -> None:
    await run_group(served, "g", [1.0])
    first = await lease(served)
    for _ in range(2):
        await served.admin("POST", "/admin/trajectories/nack", {"lease_id": first.lease_id})
    second = await lease(served)
    assert second.sequences == first.sequences
    status, body = await served.admin("POST", "/admin/trajectories/ack", {"lease_id": first.lease_id}, None)
    assert (status, body["error"]["code"]) == (409, "lease_ended")


async def test_an_expired_lease_comes_back_and_cannot_be_acked(served: Served) -> None:
    await run_group(served, "g", [1.0])
    first = await lease(served, lease_s=0.05)
    second = await lease(served, wait_s=5.0)
    assert second.sequences == first.sequences
    status, body = await served.admin("POST", "/admin/trajectories/ack", {"lease_id": first.lease_id}, None)
    assert (status, body["error"]["code"]) == (409, "lease_expired")


async def test_an_unknown_lease_is_a_404(served: Served) -> None:
    status, _ = await served.admin("POST", "/admin/trajectories/ack", {"lease_id": "nope"}, None)
    assert status == 404


async def test_a_trainer_that_leaves_while_waiting_takes_nothing(served: Served) -> None:
    waiting = asyncio.create_task(lease(served, wait_s=30.0))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await run_group(served, "g", [1.0])
    assert len((await lease(served, wait_s=2.0)).sequences) == 1


async def test_a_group_takes_no_more_sessions_than_it_has(served: Served) -> None:
    await served.open(group_id="g", group_size=1)
    for size in (1, 2):
        status, body = await served.admin(
            "POST",
            "/admin/sessions",
            {"task_id": "t", "purpose": "train", "group_id": "g", "group_size": size},
            None,
        )
        assert (status, body["error"]["code"]) == (409, "group_full")


async def test_calls_that_lived_through_an_update_are_counted_when_acked(served: Served) -> None:
    session = await served.open()
    served.fleet.say(Reply("five", spans=[(0, 1, 0), (1, len(served.fleet.encode("five")) + 1, 1)]))
    await served.post(session, ASK)
    await served.seal(session, reward=1.0)
    served.fleet.version = 1
    batch = await lease(served, max_staleness=1)
    assert set(batch.sequences[0].versions) == {-1, 0, 1}
    assert batch.version == 1
    assert batch.staleness() == 1
    assert (await served.admin("GET", "/admin/status"))["multi_version_calls"] == 0
    await served.admin("POST", "/admin/trajectories/ack", {"lease_id": batch.lease_id})
    assert (await served.admin("GET", "/admin/status"))["multi_version_calls"] == 1


async def test_leases_and_groups_survive_a_restart(tokens: Tokens, tmp_path: Path) -> None:
    one = make_app(tokens, tmp_path)
    await one.start()
    for g in ("acked", "leased", "ready"):
        await run_group(one, g, [1.0, 0.5])
    await run_group(one, "void", [None])
    half = await one.open(group_id="half", group_size=2)
    acked = await lease(one)
    await one.admin("POST", "/admin/trajectories/ack", {"lease_id": acked.lease_id})
    leased = await lease(one)
    before = await one.admin("GET", "/admin/status")
    await one.stop()

    two = make_app(tokens, tmp_path)
    await two.start()
    try:
        after = await two.admin("GET", "/admin/status")
        for key in ("groups", "calls", "sessions", "tokens_sampled", "multi_version_calls"):
            assert after[key] == before[key], key
        ready = await lease(two)
        assert {s.group_id for s in ready.sequences} == {"ready"}
        for again in (acked, leased):
            await two.admin("POST", "/admin/trajectories/ack", {"lease_id": again.lease_id})
        await two.seal(half)
    finally:
        await two.stop()


async def test_the_body_is_of_its_media_type(served: Served) -> None:
    await run_group(served, "g", [1.0])
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with served.http.post(
        served.url + "/admin/trajectories/lease", json={"groups": 1}, headers=headers
    ) as r:
        assert r.content_type == MEDIA_TYPE


async def test_a_trainer_that_starves_hears_in_the_log_whom_it_waits_for(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases, "SAY_S", 0.02)
    caplog.set_level(logging.INFO)
    session = await served.open(group_id="slow", group_size=2)
    for _ in range(4):
        await lease(served, status=204, wait_s=0.03)
    assert "group slow" in caplog.text
    assert "1 never opened" in caplog.text
    assert session["session_id"] in caplog.text


# -- traffic that others admit -----------------------------------------------------------------------


async def test_online_a_lease_waits_for_no_straggler_and_drops_what_came_too_late(
    tokens: Tokens, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Cohorts of one: `slow` stays open while the versions go on, and is ready one version too late."""
    served = make_app(tokens, tmp_path, online={"enabled": True})
    await served.start()
    slow = await served.open("slow")
    assert (await served.post(slow, ASK))[0] == 200
    for version in range(3):
        served.fleet.version = version
        for n in range(3):  # more traffic than the trainer takes
            quick = await served.open(f"quick {version} {n}")
            await served.post(quick, ASK)
            await served.seal(quick, reward=1.0)
        batch = await served.gateway.leases.lease(
            want=2, max_staleness=1, wait_s=0.0, lease_s=60.0, version=lambda: served.fleet.version
        )
        assert batch is not None, "it waits for nobody in particular"
        assert len({s.group_id for s in batch.sequences}) == 2, "and takes no more than it was asked for"
        assert batch.staleness() <= 1
        await served.gateway.leases.ack(batch.lease_id)
        if version == 1:
            served.fleet.version = 2
            await served.seal(slow, reward=1.0)
    assert served.gateway.leases.counts()["void"] == 1
    assert "its oldest token is 2 versions old, allowed are 1" in caplog.text
    await served.stop()
