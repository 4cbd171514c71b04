"""Engines join, drain and leave while calls run, and none serves before it holds the current weights."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from fakes.engine import FakeEngine
from fleet_kit import fake_fleet, run_config
from test_interruption import Call, update

from areal_agent.errors import EngineError, WeightUpdateError
from areal_gateway.fleet import UnknownEngine


async def test_a_newcomer_at_the_first_version_serves_at_once(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1) as h, FakeEngine() as fresh:
        status = await h.fleet.join(fresh.url + "/")
        assert (status["id"], status["state"]) == ("attached-1", "serving")
        calls = [Call(h, 20, f"s{i}") for i in range(8)]
        for call in calls:
            await call.assert_exact([0])
        assert Counter(c.engines[0] for c in calls) == {"attached-0": 4, "attached-1": 4}


async def test_a_newcomer_catches_up_before_its_first_token_and_disturbs_nobody(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1, step_s=0.003) as h, FakeEngine() as fresh:
        await update(h, 1)
        running = Call(h, 200)
        await h.until(lambda: len(running.ids) > 20)
        fresh.set_version(1)  # a label of another run, perhaps: it proves nothing
        assert (await h.fleet.join(fresh.url))["state"] == "starting"
        assert h.fleet.status()["needs_weights"]
        asked = len(fresh.requests)
        others = [Call(h, 20, f"s{i}") for i in range(4)]
        for call in others:
            await call.assert_exact([1])
        assert len(fresh.requests) == asked, "it served before it had the weights"
        h.engines[0].calls.clear()
        assert (await update(h, 1))["engines"] == 1, "the current version, for the newcomer alone"
        assert h.engines[0].calls == []
        assert h.states() == ["serving", "serving"]
        assert not h.fleet.status()["needs_weights"]
        assert (await update(h, 2))["engines"] == 2
        await running.assert_exact([1, 2])


async def test_a_newcomer_that_cannot_load_is_taken_out_and_the_others_serve_on(tmp_path: Path) -> None:
    config = run_config(fleet={"max_restarts": 0})
    async with fake_fleet(tmp_path, 1, config=config) as h, FakeEngine() as fresh:
        await update(h, 1)
        await h.fleet.join(fresh.url)
        fresh.faults.rpc = {"areal_load": "error"}
        with pytest.raises(
            WeightUpdateError, match="no engine that lacked version 1 took it: attached-1"
        ) as e:
            await update(h, 1)
        assert e.value.retry
        await h.until(lambda: h.states() == ["serving", "gone"])
        assert h.fleet.status()["error"] is None
        await Call(h, 20).assert_exact([1])


async def test_a_newcomer_may_also_wait_for_the_next_update(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1) as h, FakeEngine() as fresh:
        await update(h, 1)
        await h.fleet.join(fresh.url)
        assert (await update(h, 2))["engines"] == 2
        assert h.states() == ["serving", "serving"]
        assert fresh.weights_version == 2


async def test_a_drained_engine_ends_its_calls_and_gets_no_new_ones(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2, step_s=0.003) as h:
        calls = [Call(h, 150, f"s{i}") for i in range(4)]
        await h.until(lambda: all(len(c.ids) > 10 for c in calls))
        assert (await h.fleet.drain("attached-0"))["state"] == "draining"
        more = [Call(h, 20, f"s{i}") for i in range(4)]
        for call in more:
            await call.assert_exact([0])
            assert call.engines == ["attached-1"], "its sessions move"
        await update(h, 1)  # and its calls live through it, as everybody's
        for call in calls:
            await call.assert_exact([0, 1])
            assert len(call.engines) == 1
        assert h.states() == ["draining", "serving"]
        assert (await h.fleet.join(h.engines[0].url))["state"] == "serving"


async def test_an_engine_that_leaves_hands_its_calls_over(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2, step_s=0.003) as h:
        calls = [Call(h, 150, f"s{i}") for i in range(4)]
        await h.until(lambda: all(len(c.ids) > 10 for c in calls))
        assert (await h.fleet.leave(h.engines[0].url))["state"] == "gone"
        for call in calls:
            await call.assert_exact([0])
            assert call.engines[-1] == "attached-1"
        assert [e["id"] for e in h.fleet.status()["engines"]] == ["attached-1"]
        assert (await update(h, 1))["engines"] == 1
        await h.fleet.join(h.engines[0].url)
        assert (await update(h, 1))["engines"] == 1
        assert h.states() == ["serving", "serving"]


async def test_without_any_engine_calls_wait_for_one_to_join(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1) as h, FakeEngine() as fresh:
        await h.fleet.leave("attached-0")
        call = Call(h, 20)
        await asyncio.sleep(0.1)
        assert not call.task.done()
        await h.fleet.join(fresh.url)
        await call.assert_exact([0])
        assert call.engines == ["attached-1"]


async def test_wrong_names_and_dead_addresses_are_told_and_change_nothing(tmp_path: Path) -> None:
    config = run_config(fleet={"start_timeout_s": 0.3})
    async with fake_fleet(tmp_path, 1, config=config) as h:
        for step in (h.fleet.drain, h.fleet.leave):
            with pytest.raises(UnknownEngine, match="no engine is called nobody; there are attached-0"):
                await step("nobody")
        with pytest.raises(EngineError, match=r"cannot attach http://127.0.0.1:9"):
            await h.fleet.join("http://127.0.0.1:9")
        assert h.states() == ["serving"]


async def test_an_engine_that_was_up_for_long_may_fail_again(tmp_path: Path, monkeypatch) -> None:
    """Restarts are counted in a row: a run of days does not use them up one crash at a time."""
    monkeypatch.setattr("areal_gateway.fleet.member.BACKOFF_S", 0.05)
    monkeypatch.setattr("areal_gateway.fleet.member.STEADY_S", 0.3)
    async with fake_fleet(tmp_path, 1, config=run_config(fleet={"max_restarts": 1})) as h:
        for _ in range(3):
            await asyncio.sleep(0.5)
            h.engines[0].faults.http = {"/health": "error"}
            await h.until(lambda: h.states() != ["serving"])
            h.engines[0].faults.http = {}
            await h.until(lambda: h.states() == ["serving"])
