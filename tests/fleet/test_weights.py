"""The weight transaction: every serving engine holds version v, or none does, or the fleet says it is held."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.engine import FakeEngine
from fakes.policy import expected
from fakes.receivers import simulated_checksums
from fakes.sender import Sender, checksums, pack
from fleet_kit import Harness, fake_fleet, run_config, until

from areal_agent.errors import WeightUpdateError
from areal_agent.weights import DISK, Manifest, plan
from areal_gateway.fleet import EngineSampling, Fleet, WeightConflict

MANIFEST = plan([("w", "float32", (4,)), ("v", "float32", (8,))], 16)
STORE = {"host": "127.0.0.1", "port": 1}
PROMPT = [5, 6, 7]


def tensors(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(64, 33, generator=g) for i in range(5)}


async def begin(h: Harness, version: int, transport: str = "gloo", **kw: Any) -> dict[str, Any]:
    store = {"folder": "/nothing/is/read"} if transport == DISK else STORE
    return await h.fleet.weights.begin(
        version=version, manifest=MANIFEST, store=store, backend=transport, **kw
    )


async def update(h: Harness, version: int, **kw: Any) -> dict[str, Any]:
    """A whole update of simulated receivers."""
    begun = await begin(h, version, **kw)
    sums = simulated_checksums(version, len(MANIFEST.buckets))
    return await h.fleet.weights.commit(begun["update_id"], sums)


async def reply(h: Harness, n: int = 20, session: str = "s", **kw: Any) -> tuple[list[int], list[tuple]]:
    sampling = EngineSampling(max_tokens=n, temperature=0.0, extra={"ignore_eos": True}, **kw)
    ids: list[int] = []
    async with aclosing(h.fleet.generate(session_id=session, prompt_ids=PROMPT, sampling=sampling)) as stream:
        async for chunk in stream:
            ids += chunk.token_ids
            if chunk.spans is not None:
                return ids, chunk.spans
    raise AssertionError("no last chunk")


def assert_agrees(h: Harness) -> None:
    """Invariant 8, asked of the engines themselves."""
    for status, engine in zip(h.fleet.status()["engines"], h.engines, strict=True):
        if status["state"] == "serving":
            assert status["version"] == h.fleet.version
            assert engine.label == str(h.fleet.version)
            assert engine.weights_version == h.fleet.version
            assert not engine.paused


# --- the good case ---------------------------------------------------------------------------------------


async def test_broadcast_weights_arrive_in_every_engine(tmp_path: Path) -> None:
    sender = Sender()
    async with fake_fleet(tmp_path, 2, receiver="gloo") as h:
        epochs = []
        for version in (1, 2, 3):
            sent = tensors(version)
            manifest, buckets = pack(sent, 8192)
            assert len(buckets) > 1
            begun = await sender.begin(h.fleet.weights, version, manifest)
            assert begun["world_size"] == 3
            epochs.append((begun["epoch"], begun["join"]))
            await sender.send(begun, buckets)
            result = await h.fleet.weights.commit(begun["update_id"], checksums(buckets))
            assert result | {"version": version, "engines": 2} == result
            assert 0 <= result["load_s"] <= result["pause_s"] < 5
            assert_agrees(h)
            for engine in h.engines:
                assert engine.loaded.keys() == sent.keys()
                assert all(torch.equal(engine.loaded[k], sent[k]) for k in sent)
        # one group serves for as long as its members stay
        assert epochs == [(epochs[0][0], True), (epochs[0][0], False), (epochs[0][0], False)]
        sender.leave()


async def test_calls_in_flight_live_through_an_update_with_a_version_per_token(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2, step_s=0.002) as h:
        calls = [asyncio.create_task(reply(h, 150, session=f"s{i}")) for i in range(6)]
        await h.until(lambda: all(e.running for e in h.engines))
        await asyncio.sleep(0.05)
        await update(h, 1)
        for ids, spans in await asyncio.gather(*calls):
            (a, b, v), (c, d, w) = spans
            assert (a, v, w, d) == (0, 0, 1, 150)
            assert 0 < b == c < 150
            assert ids[:b] == expected(PROMPT, b, version=0)[0], "old tokens are the old policy's"
            assert ids[b:] == expected(PROMPT + ids[:b], 150 - b, version=1)[0], "new ones the new one's"


async def test_calls_that_arrive_during_the_switch_wait_and_see_only_the_new_version(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2) as h:
        begun = await begin(h, 1)
        h.fleet.hold()
        call = asyncio.create_task(reply(h))
        await asyncio.sleep(0.05)
        assert not call.done()
        await h.fleet.weights.commit(begun["update_id"], simulated_checksums(1, 2))
        assert (await call)[1] == [(0, 20, 1)]


async def test_every_step_of_the_switch_happens_under_pause_and_in_order(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2) as h:
        for engine in h.engines:
            engine.calls.clear()
        await update(h, 1)
        for engine in h.engines:
            names = [name for name, _ in engine.calls if name != "areal_status"]
            assert names == [
                "areal_join",
                "areal_receive",
                "/pause",
                "areal_progress",
                "areal_load",
                "/update_weight_version",
                "/weight_info",
                "/resume",
            ]
            assert ("/pause", {"mode": "keep"}) in engine.calls
        states = [e["state"] for e in h.events if e["type"] == "weights"]
        assert states == ["receiving", "holding", "paused", "loading", "verifying", "committed", "serving"]


async def test_the_engines_ranks_follow_the_trainers(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 3) as h:
        await update(h, 1)
        joins = [arg for e in h.engines for name, arg in e.calls if name == "areal_join"]
        assert [(j["rank_offset"], j["world_size"]) for j in joins] == [(1, 4), (2, 4), (3, 4)]
        assert len({j["epoch"] for j in joins}) == 1


# --- who may begin ---------------------------------------------------------------------------------------


async def test_versions_follow_one_another_unless_forced(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1) as h:
        for wrong in (0, 2, 7):
            with pytest.raises(WeightConflict):
                await begin(h, wrong)
        await update(h, 1)
        with pytest.raises(WeightConflict):
            await begin(h, 1)
        assert (await update(h, 40, force=True))["version"] == 40
        assert (await reply(h))[1] == [(0, 20, 40)]
        assert (await update(h, 41))["version"] == 41


async def test_one_update_at_a_time(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1) as h:
        begun = await begin(h, 1)
        with pytest.raises(WeightConflict, match="version 1 is running"):
            await begin(h, 1)
        await h.fleet.weights.abort(begun["update_id"], "test")
        await update(h, 1)


async def test_a_resumed_trainer_takes_over_from_one_that_died_in_its_update(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1) as h:
        old = await begin(h, 1)
        await update(h, 9, force=True)
        with pytest.raises(WeightUpdateError) as caught:
            await h.fleet.weights.commit(old["update_id"], simulated_checksums(1, 2))
        assert caught.value.retry
        assert h.fleet.version == 9


async def test_a_repeated_commit_gets_the_same_answer(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1) as h:
        begun = await begin(h, 1)
        sums = simulated_checksums(1, 2)
        one, two = await asyncio.gather(*(h.fleet.weights.commit(begun["update_id"], sums) for _ in range(2)))
        three = await h.fleet.weights.commit(begun["update_id"], sums)
        assert one == two == three
        assert sum(name == "areal_load" for name, _ in h.engines[0].calls) == 1


async def test_a_trainer_that_hangs_up_during_commit_does_not_stop_it(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2) as h:
        begun = await begin(h, 1)
        commit = asyncio.create_task(h.fleet.weights.commit(begun["update_id"], simulated_checksums(1, 2)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        commit.cancel()
        await h.until(lambda: h.fleet.version == 1 and h.fleet.state == "serving")
        assert_agrees(h)


async def test_abort_leaves_the_old_version_serving(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2) as h:
        begun = await begin(h, 1)
        await h.fleet.weights.abort(begun["update_id"], "test")
        await h.fleet.weights.abort(begun["update_id"], "again: nothing happens")
        assert (await reply(h))[1] == [(0, 20, 0)]
        with pytest.raises(WeightUpdateError) as caught:
            await h.fleet.weights.commit(begun["update_id"], simulated_checksums(1, 2))
        assert caught.value.retry
        assert (await begin(h, 1))["join"], "an aborted epoch's group is not used again"


async def test_abort_during_commit_stops_a_receive_that_never_ends(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2) as h:
        for e in h.engines:
            e.faults.receive = "hang"
        begun = await begin(h, 1)
        commit = asyncio.create_task(h.fleet.weights.commit(begun["update_id"], simulated_checksums(1, 2)))
        await asyncio.sleep(0.1)
        await h.fleet.weights.abort(begun["update_id"], "gave up")
        with pytest.raises(WeightUpdateError, match="gave up") as caught:
            await commit
        assert caught.value.retry
        assert h.fleet.state == "serving"
        assert (await reply(h))[1] == [(0, 20, 0)]


# --- faults ----------------------------------------------------------------------------------------------


@dataclass
class Fault:
    """What breaks in which engines, and where the fleet must end up."""

    name: str
    where: tuple[int, ...]
    faults: dict[str, Any]
    ends_in: str  # "v" committed by the others; "v-1" goes on, offered again; "held" visibly
    within_s: float = 3.0


BOTH, ONE = (0, 1), (1,)
TABLE = [
    Fault("join refused by one", ONE, {"rpc": {"areal_join": "error"}}, "v-1"),
    Fault("join refused by all", BOTH, {"rpc": {"areal_join": "error"}}, "v-1"),
    Fault("join hangs in one", ONE, {"rpc": {"areal_join": "hang"}}, "v-1"),
    Fault("engine dies at join", ONE, {"rpc": {"areal_join": "die"}}, "v-1"),
    Fault("receive refused by one", ONE, {"rpc": {"areal_receive": "error"}}, "v-1"),
    Fault("engine dies at receive", ONE, {"rpc": {"areal_receive": "die"}}, "v-1"),
    Fault("receive fails in one", ONE, {"receive": "fail"}, "v-1"),
    Fault("receive fails in all", BOTH, {"receive": "fail"}, "v-1"),
    Fault("receive never ends in one", ONE, {"receive": "hang"}, "v-1", within_s=5.0),
    Fault("receive never ends in all", BOTH, {"receive": "hang"}, "v-1", within_s=5.0),
    Fault("a bucket is corrupted in one", ONE, {"receive": "corrupt"}, "v-1"),
    Fault("a bucket is corrupted in all", BOTH, {"receive": "corrupt"}, "v-1"),
    Fault("pause refused by one", ONE, {"http": {"/pause": "error"}}, "v-1"),
    Fault("pause refused by all", BOTH, {"http": {"/pause": "error"}}, "v-1"),
    Fault("pause hangs in one", ONE, {"http": {"/pause": "hang"}}, "v-1"),
    Fault("engine dies at pause", ONE, {"http": {"/pause": "die"}}, "v-1"),
    Fault("load fails in one", ONE, {"rpc": {"areal_load": "error"}}, "v"),
    Fault("load hangs in one", ONE, {"rpc": {"areal_load": "hang"}}, "v"),
    Fault("engine dies at load", ONE, {"rpc": {"areal_load": "die"}}, "v"),
    Fault("load fails in all", BOTH, {"rpc": {"areal_load": "error"}}, "held"),
    Fault("label refused by one", ONE, {"http": {"/update_weight_version": "error"}}, "v"),
    Fault("label not taken by one", ONE, {"http": {"/update_weight_version": "lie"}}, "v"),
    Fault("label not taken by all", BOTH, {"http": {"/update_weight_version": "lie"}}, "held"),
    Fault("label cannot be read back", ONE, {"http": {"/weight_info": "error"}}, "v"),
    Fault("resume refused by one", ONE, {"http": {"/resume": "error"}}, "v"),
    Fault("resume hangs in one", ONE, {"http": {"/resume": "hang"}}, "v"),
    Fault("resume refused by all", BOTH, {"http": {"/resume": "error"}}, "held"),
]


def over_disk(fault: Fault) -> Fault | None:
    """The same fault where there is no group to join, and staging starts with one call."""
    rpc = dict(fault.faults.get("rpc", {}))
    if "areal_join" in rpc:
        return None
    if "areal_receive" in rpc:
        rpc["areal_stage"] = rpc.pop("areal_receive")
    return replace(fault, faults=fault.faults | {"rpc": rpc})


CASES = [pytest.param("gloo", f, id=f.name) for f in TABLE]
CASES += [pytest.param(DISK, g, id=f"disk: {f.name}") for f in TABLE if (g := over_disk(f)) is not None]


@pytest.mark.parametrize(("transport", "fault"), CASES)
async def test_a_failure_ends_in_v_or_in_v_minus_1_or_is_visibly_held(
    tmp_path: Path, transport: str, fault: Fault
) -> None:
    config = run_config(
        fleet={"max_restarts": 0}, gateway={"hold_timeout_s": 1.5}, weights={"transfer_timeout_s": 1}
    )
    async with fake_fleet(tmp_path, 2, config=config) as h:
        await update(h, 1, transport=transport)  # so that nothing may serve version 0 any more
        again = await begin(h, 2, transport)
        await h.fleet.weights.abort(again["update_id"], "so that the next one joins anew")
        for i in fault.where:
            for name, value in fault.faults.items():
                setattr(h.engines[i].faults, name, value)
        began = time.monotonic()
        error: WeightUpdateError | None = None
        try:
            await update(h, 2, transport=transport)
        except WeightUpdateError as e:
            error = e
        assert time.monotonic() - began < fault.within_s
        assert not h.fleet.weights.running
        assert h.fleet.version == (2 if fault.ends_in == "v" else 1)
        assert (error is None) == (fault.ends_in == "v")
        if fault.ends_in == "held":
            assert error is not None
            assert not error.retry
            assert h.fleet.state == "held(error)"
            assert "engine" in str(h.fleet.status()["error"]) or "attached" in str(h.fleet.status()["error"])
            with pytest.raises(Exception, match="held"):
                await reply(h)
            return
        if error is not None:
            assert error.retry
        assert_agrees(h)
        assert h.fleet.state == "serving"
        _, spans = await reply(h)
        assert spans == [(0, 20, h.fleet.version)]
        # what is left takes the next update, in a group of its own when the old one broke
        for i in fault.where:
            h.engines[i].faults.rpc, h.engines[i].faults.http, h.engines[i].faults.receive = {}, {}, None
        result = await update(h, h.fleet.version + 1, transport=transport)
        assert_agrees(h)
        assert result["engines"] == h.states().count("serving") >= 1


async def test_a_worker_that_answers_nonsense_cannot_wedge_the_fleet(tmp_path: Path, monkeypatch) -> None:
    """Before the switch nothing changed; within it the engines' weights are unknown, so none may serve."""
    async with fake_fleet(tmp_path, 2, config=run_config(fleet={"max_restarts": 0})) as h:
        begun = await begin(h, 1)
        with monkeypatch.context() as m:
            for e in h.engines:
                m.setattr(e.receiver, "areal_status", lambda _: {"phase": "received"})
            with pytest.raises(KeyError):
                await h.fleet.weights.commit(begun["update_id"], simulated_checksums(1, 2))
        assert not h.fleet.weights.running
        assert (await reply(h))[1] == [(0, 20, 0)]
        begun = await begin(h, 1)
        for e in h.engines:
            monkeypatch.setattr(e.receiver, "areal_load", lambda _: {"version": 1})
        with pytest.raises(KeyError):
            await h.fleet.weights.commit(begun["update_id"], simulated_checksums(1, 2))
        assert "serving" not in h.states()
        assert not h.fleet.weights.running


async def test_no_token_is_decoded_with_weights_that_failed_to_load(tmp_path: Path) -> None:
    """Calls frozen in the broken engine move to the other one and are exact there."""
    async with fake_fleet(tmp_path, 2, step_s=0.002) as h:
        calls = [asyncio.create_task(reply(h, 200, session=f"s{i}")) for i in range(4)]
        await h.until(lambda: all(e.running for e in h.engines))
        await asyncio.sleep(0.05)
        h.engines[1].faults.rpc = {"areal_load": "error"}
        assert (await update(h, 1))["engines"] == 1
        for ids, spans in await asyncio.gather(*calls):
            assert [v for _, _, v in spans] == [0, 1]
            cut = spans[0][1]
            assert ids[:cut] == expected(PROMPT, cut, version=0)[0]
            assert ids[cut:] == expected(PROMPT + ids[:cut], 200 - cut, version=1)[0]


async def test_a_trainer_that_dies_after_begin_is_given_up_on_by_deadline(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("areal_gateway.fleet.weights.SLACK_S", 0.1)
    config = run_config(weights={"join_timeout_s": 0.5, "transfer_timeout_s": 0.5})
    sender = Sender(timeout_s=5)
    async with fake_fleet(tmp_path, 2, config=config, receiver="gloo") as h:
        manifest, _ = pack(tensors(1))
        await sender.begin(h.fleet.weights, 1, manifest)  # and dies: nobody joins, nobody sends
        assert (await reply(h))[1] == [(0, 20, 0)]
        await h.until(lambda: not h.fleet.weights.running, 3)
        assert h.states() == ["serving", "serving"]
        # a new trainer, in a store of its own
        assert (await Sender().push(h.fleet.weights, 1, tensors(1)))["engines"] == 2
        assert_agrees(h)


async def test_a_trainer_that_dies_between_two_buckets_is_given_up_on(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2, receiver="gloo") as h:
        sender = Sender(timeout_s=5)
        manifest, buckets = pack(tensors(1), 8192)
        begun = await sender.begin(h.fleet.weights, 1, manifest)
        await sender.send(begun, buckets[:1])
        sender.leave()
        with pytest.raises(WeightUpdateError) as caught:
            await h.fleet.weights.commit(begun["update_id"], checksums(buckets))
        assert caught.value.retry
        assert h.states() == ["serving", "serving"], "the engines did nothing wrong"
        assert (await reply(h))[1] == [(0, 20, 0)]
        again = await sender.push(h.fleet.weights, 1, tensors(1))
        assert again["engines"] == 2
        assert_agrees(h)
        sender.leave()


async def test_an_engine_that_dies_in_the_broadcast_is_left_out_of_the_next_epoch(tmp_path: Path) -> None:
    config = run_config(fleet={"max_restarts": 0})
    async with fake_fleet(tmp_path, 2, config=config, receiver="gloo") as h:
        sender = Sender(timeout_s=3)
        manifest, buckets = pack(tensors(1), 8192)
        begun = await sender.begin(h.fleet.weights, 1, manifest)
        await asyncio.to_thread(sender.join, begun["epoch"], begun["world_size"])
        await asyncio.to_thread(sender.broadcast, buckets[:2])
        h.engines[1].receiver.close()
        h.engines[1].kill()
        with contextlib.suppress(RuntimeError):  # the sender may or may not notice
            await asyncio.to_thread(sender.broadcast, buckets[2:])
        with pytest.raises(WeightUpdateError) as caught:
            await h.fleet.weights.commit(begun["update_id"], checksums(buckets))
        assert caught.value.retry
        result = await sender.push(h.fleet.weights, 1, tensors(1))
        assert result["engines"] == 1
        assert_agrees(h)
        sender.leave()


async def test_an_engine_that_lost_its_weights_serves_only_after_the_next_update(tmp_path: Path) -> None:
    config = run_config(gateway={"hold_timeout_s": 0.3})
    async with fake_fleet(tmp_path, 1, config=config) as h:
        await update(h, 1)
        engine: FakeEngine = h.engines[0]
        engine.set_version(0)  # as after a restart: the model folder's weights again
        engine.label = "default"
        engine.faults.http = {"/health": "error"}
        await h.until(lambda: h.states() == ["gone"])
        engine.faults.http = {}
        await h.until(lambda: h.fleet.status()["needs_weights"])
        assert h.states() == ["starting"]
        with pytest.raises(Exception, match="waits for the weights of version 1"):
            await reply(h)
        assert (await update(h, 1))["version"] == 1, "the current version may be pushed again"
        assert_agrees(h)
        assert (await reply(h))[1] == [(0, 20, 1)]


GATEWAY = """
import asyncio, sys
from pathlib import Path
from areal_agent.weights import plan
from areal_gateway.fleet import Fleet
from fleet_kit import run_config
from fakes.receivers import simulated_checksums

async def main(url, run_dir):
    config = run_config()
    config.fleet.attach = [url]
    fleet = Fleet(config, Path(run_dir), lambda _: None)
    await fleet.start()
    store = {"host": "127.0.0.1", "port": 1}
    manifest = plan([("w", "float32", (4,))], 16)
    for version in (1, 2):
        begun = await fleet.weights.begin(version=version, manifest=manifest, store=store, backend="gloo")
        await fleet.weights.commit(begun["update_id"], simulated_checksums(version, 1))
        await asyncio.to_thread(sys.stdin.readline)  # the test prepares how the next one ends

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "dies_in", ["areal_receive", "/pause", "areal_load", "/update_weight_version", "/resume"]
)
async def test_engines_of_a_gateway_that_was_killed_serve_only_what_they_stamp(
    tmp_path: Path, dies_in: str
) -> None:
    """kill -9 of the gateway within its second update; another one attaches to the engine."""
    async with FakeEngine() as engine:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", GATEWAY, engine.url, str(tmp_path), env=env, stdin=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        try:
            await until(lambda: engine.label == "1" and not engine.paused, 30)
            if dies_in == "areal_receive":
                engine.faults.receive = "hang"
            elif dies_in == "areal_load":
                engine.faults.rpc = {dies_in: "hang"}
            else:
                engine.faults.http = {dies_in: "hang"}
            engine.calls.clear()
            process.stdin.write(b"go on\n")
            await until(lambda: any(name == dies_in for name, _ in engine.calls), 30)
        finally:
            process.kill()
            await process.wait()
        engine.faults.rpc, engine.faults.http, engine.faults.receive = {}, {}, None
        config = run_config()
        config.fleet.attach = [engine.url]
        fleet = Fleet(config, tmp_path, lambda _: None)
        await fleet.start()
        h = Harness(fleet, [engine], [])
        try:
            held = engine.weights_version
            if dies_in == "/update_weight_version":  # loaded, and not labelled
                assert held == 2
                assert h.states() == ["starting"]
                assert fleet.status()["needs_weights"]
            else:
                assert h.states() == ["serving"]
                assert fleet.version == held == int(engine.label)
                assert (await reply(h))[1] == [(0, 20, held)]
            await update(h, 7, force=True)
            assert (await reply(h))[1] == [(0, 20, 7)]
        finally:
            await fleet.stop()


def test_manifests_are_accepted_as_json_too() -> None:
    assert Manifest.model_validate(MANIFEST.model_dump(mode="json")) == MANIFEST
