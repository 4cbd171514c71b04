"""Real vLLM, real weights over gloo: after every update each token is the new policy's, to float32."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes.sender import Sender, checksums, pack
from fleet_kit import Policies, until
from real_kit import PROMPT, TOLERANCE, assert_exact, engine_config, reply, traffic

from areal_agent.errors import WeightUpdateError
from areal_gateway.fleet import Fleet

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


@pytest.fixture(params=["tied", "untied"])
async def run(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path: Path
) -> AsyncIterator[tuple[Fleet, Policies]]:
    fleet = Fleet(engine_config(models[request.param]), tmp_path, lambda _: None)
    await fleet.start()
    try:
        yield fleet, Policies(models[request.param])
    finally:
        await fleet.stop()


async def test_updates_on_a_real_engine(run: tuple[Fleet, Policies]) -> None:
    """One engine, one story: its start is what costs."""
    fleet, policies = run
    sender = Sender()

    # The engine's own weights.
    ids, logprobs, spans = await reply(fleet)
    assert spans == [(0, 40, 0)]
    assert_exact(policies, ids, logprobs, spans)
    # Versions differ enough for the comparison to tell.
    assert (policies.logprobs(1, PROMPT, ids) - logprobs).abs().max() > 100 * TOLERANCE

    # Several updates; the packed copies of every layer, the (tied) head included, follow each of them.
    for version in (1, 2, 3):
        result = await sender.push(fleet.weights, version, policies.tensors(version), bucket_bytes=1 << 19)
        assert result["version"] == version
        ids, logprobs, spans = await reply(fleet)
        assert spans == [(0, 40, version)]
        assert_exact(policies, ids, logprobs, spans)

    # Replies that live through an update: exact on both sides of the boundary.
    tensors = policies.tensors(4)
    async with traffic(fleet) as replies:
        await sender.push(fleet.weights, 4, tensors)
    assert [r for r in replies if [v for _, _, v in r[2]] == [3, 4]]
    for ids, logprobs, spans in replies:
        assert_exact(policies, ids, logprobs, spans)

    # A trainer that is killed between two buckets: version 4 goes on, exactly.
    manifest, buckets = pack(policies.tensors(5), 1 << 18)
    assert len(buckets) > 2
    begun = await sender.begin(fleet.weights, 5, manifest)
    await sender.send(begun, buckets[:2])
    sender.leave()
    with pytest.raises(WeightUpdateError) as caught:
        await fleet.weights.commit(begun["update_id"], checksums(buckets))
    assert caught.value.retry
    ids, logprobs, spans = await reply(fleet)
    assert spans == [(0, 40, 4)]
    assert_exact(policies, ids, logprobs, spans)

    # A bucket that is not what the trainer says it sent is never loaded.
    begun = await sender.begin(fleet.weights, 5, manifest)
    assert begun["join"]
    damaged = [b.clone() for b in buckets]
    damaged[1][100] ^= 1
    await sender.send(begun, damaged)
    with pytest.raises(WeightUpdateError, match="sent were"):
        await fleet.weights.commit(begun["update_id"], checksums(buckets))
    ids, logprobs, spans = await reply(fleet)
    assert_exact(policies, ids, logprobs, spans)
    assert fleet.version == 4

    # An update that lacks a weight kills the engine rather than leave it half new ...
    part = policies.tensors(5)
    del part["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(WeightUpdateError, match=r"k_proj|qkv_proj") as caught:
        await sender.push(fleet.weights, 5, part)
    assert not caught.value.retry
    assert fleet.state == "held(error)"
    sender.leave()

    # ... it comes back, waits for weights, and serves them once they are pushed.
    await until(lambda: fleet.status()["needs_weights"], 180)
    assert (await Sender().push(fleet.weights, 5, policies.tensors(5)))["engines"] == 1
    ids, logprobs, spans = await reply(fleet)
    assert spans == [(0, 40, 5)]
    assert_exact(policies, ids, logprobs, spans)


async def test_a_killed_engine_takes_no_reply_with_it(models: dict[str, Path], tmp_path: Path) -> None:
    """Two real engines; kill -9 one of them mid-reply."""
    config = engine_config(models["tied"])
    config.fleet.engines = 2
    fleet = Fleet(config, tmp_path, lambda _: None)
    await fleet.start()
    try:
        policies, sender = Policies(models["tied"]), Sender()
        assert (await sender.push(fleet.weights, 1, policies.tensors(1)))["engines"] == 2
        calls = [asyncio.create_task(reply(fleet, 400, f"s{i}")) for i in range(8)]
        await until(lambda: sum(m.calls for m in fleet.members) == 8)
        assert [m.calls for m in fleet.members] == [4, 4]
        await asyncio.sleep(0.3)
        process = fleet.members[0].process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        for ids, logprobs, spans in await asyncio.gather(*calls):
            assert spans == [(0, 400, 1)]
            assert_exact(policies, ids, logprobs, spans)
        # The next update goes to the one that is left, in a new epoch.
        assert (await sender.push(fleet.weights, 2, policies.tensors(2)))["engines"] == 1
        ids, logprobs, spans = await reply(fleet)
        assert_exact(policies, ids, logprobs, spans)
        sender.leave()
    finally:
        await fleet.stop()
