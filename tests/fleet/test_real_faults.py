"""Real vLLM loses its trainer, an engine and a receiver within updates: nothing hangs, nothing is half new."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.sender import Sender, checksums, pack
from fleet_kit import Policies, until
from real_kit import assert_exact, engine_config, reply
from safetensors.torch import save_file

from areal_agent.errors import WeightUpdateError
from areal_agent.weights import DISK, LOCK_FILE, shard_name
from areal_gateway.fleet import EngineState, Fleet

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

BUCKET = 1 << 19

HALF_A_TRAINER = """
import sys, time, json, torch
from fakes.sender import Sender
sender = Sender()
print(json.dumps(sender.store), flush=True)
begun, size = json.loads(sys.stdin.readline())
sender.join(begun["epoch"], begun["world_size"])
sender.broadcast([torch.zeros(size, dtype=torch.uint8)])
print("sent one", flush=True)
time.sleep(600)
"""
"""A trainer that has sent its first bucket and goes no further."""


async def die_within_a_broadcast(fleet: Fleet, policies: Policies, version: int) -> dict[str, Any]:
    """kill -9 a trainer after its first bucket; what it had begun."""
    manifest, buckets = pack(policies.tensors(version), BUCKET)
    assert len(buckets) > 2
    trainer = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        HALF_A_TRAINER,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    try:
        store = json.loads(await trainer.stdout.readline())
        begun = await fleet.weights.begin(version=version, manifest=manifest, store=store, backend="gloo")
        trainer.stdin.write(json.dumps([begun, buckets[0].numel()]).encode() + b"\n")
        assert (await trainer.stdout.readline()).strip() == b"sent one"
    finally:
        trainer.kill()
        await trainer.wait()
    return begun


def write(folder: Path, tensors: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """As a trainer with `weights.transport: disk`: (arguments of begin, checksums)."""
    manifest, buckets = pack(tensors, BUCKET)
    folder.mkdir()
    (folder / LOCK_FILE).touch()
    for i, bucket in enumerate(manifest.buckets):
        name = shard_name(i, len(buckets))
        save_file({t.name: tensors[t.name].contiguous() for t in bucket.tensors}, folder / name)
    return {"manifest": manifest, "store": {"folder": str(folder)}, "backend": DISK}, checksums(buckets)


async def test_updates_while_trainer_engine_and_receiver_fail(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Two engines, one story: their start is what costs."""
    config = engine_config(models["tied"])
    config.fleet.engines = 2
    events: list[dict[str, Any]] = []
    fleet = Fleet(config, tmp_path, events.append)
    await fleet.start()
    try:
        policies, sender = Policies(models["tied"]), Sender()
        assert (await sender.push(fleet.weights, 1, policies.tensors(1), bucket_bytes=BUCKET))["engines"] == 2

        # The trainer dies; what it began is not loaded, and the next trainer does not wait for its deadline.
        calls = [asyncio.create_task(reply(fleet, 600, f"s{i}")) for i in range(4)]
        await until(lambda: sum(m.calls for m in fleet.members) == 4)
        begun = await die_within_a_broadcast(fleet, policies, 2)
        with pytest.raises(WeightUpdateError, match="running"):
            await sender.push(fleet.weights, 2, policies.tensors(2))
        sender = Sender()
        pushed = await sender.push(fleet.weights, 2, policies.tensors(2), force=True, bucket_bytes=BUCKET)
        assert pushed["engines"] == 2
        with pytest.raises(WeightUpdateError, match="not running"):
            await fleet.weights.commit(begun["update_id"], [])
        for ids, logprobs, spans in await asyncio.gather(*calls):
            assert [v for _, _, v in spans] in ([1], [1, 2])
            assert_exact(policies, ids, logprobs, spans)

        # An engine dies while it receives; its calls go on elsewhere, and the same version is offered again.
        calls = [asyncio.create_task(reply(fleet, 600, f"t{i}")) for i in range(4)]
        await until(lambda: all(m.calls for m in fleet.members))
        manifest, buckets = pack(policies.tensors(3), BUCKET)
        begun = await sender.begin(fleet.weights, 3, manifest)
        await sender.send(begun, buckets[:1])
        lost = fleet.members[0]
        assert lost.process is not None
        os.kill(lost.process.pid, signal.SIGKILL)
        await until(lambda: lost.state is not EngineState.SERVING)
        with pytest.raises(WeightUpdateError) as caught:
            await fleet.weights.commit(begun["update_id"], checksums(buckets))
        assert caught.value.retry
        sender.leave()
        pushed = await sender.push(fleet.weights, 3, policies.tensors(3), bucket_bytes=BUCKET)
        assert pushed["engines"] == 1
        for ids, logprobs, spans in await asyncio.gather(*calls):
            assert [v for _, _, v in spans] in ([2], [2, 3])
            assert_exact(policies, ids, logprobs, spans)

        # A receiver breaks in the engine that is left; that engine goes on with the weights it has.
        begun = await sender.begin(fleet.weights, 4, manifest)
        (left,) = [m for m in fleet.members if m.state is EngineState.SERVING]
        await left.client.rpc("areal_abort", {"epoch": begun["epoch"]}, 10)
        with pytest.raises(WeightUpdateError, match="receiving") as caught:
            await fleet.weights.commit(begun["update_id"], checksums(buckets))
        assert caught.value.retry
        sender.leave()
        ids, logprobs, spans = await reply(fleet)
        assert [v for _, _, v in spans] == [3]
        assert_exact(policies, ids, logprobs, spans)

        # The next version comes over disk; the engine that was killed is given it when it is up, by no trainer.
        arguments, sums = write(tmp_path / "version-4", policies.tensors(4))
        begun = await fleet.weights.begin(version=4, **arguments)
        await fleet.weights.commit(begun["update_id"], sums)
        ids, logprobs, spans = await reply(fleet)
        assert spans == [(0, 40, 4)]
        assert_exact(policies, ids, logprobs, spans)
        await until(lambda: all(m.state is EngineState.SERVING for m in fleet.members), 180, fleet.status)
        assert [m.version for m in fleet.members] == [4, 4]
        await fleet.drain(left.id)
        ids, logprobs, spans = await reply(fleet, session="by the one that came back")
        assert spans == [(0, 40, 4)]
        assert_exact(policies, ids, logprobs, spans)
    finally:
        await fleet.stop()
