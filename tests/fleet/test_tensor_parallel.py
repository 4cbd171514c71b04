"""An engine of two ranks: every worker is in the weight group, and its share of the model is the new one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fakes.sender import Sender
from fleet_kit import Policies, until
from real_kit import PROMPT, TOLERANCE, assert_exact, engine_config, reply

from areal_gateway.fleet import Fleet

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]


async def test_updates_reach_every_rank_of_an_engine(models: dict[str, Path], tmp_path: Path) -> None:
    config = engine_config(models["untied"])
    config.fleet.tensor_parallel = 2
    fleet = Fleet(config, tmp_path, lambda _: None)
    await fleet.start()
    try:
        policies, sender = Policies(models["untied"]), Sender()
        (engine,) = fleet.members
        assert engine.world_size == 2
        for version in (1, 2):
            pushed = await sender.push(
                fleet.weights, version, policies.tensors(version), bucket_bytes=1 << 19
            )
            assert pushed["engines"] == 1
            workers = await engine.client.rpc("areal_status", {}, 10)
            assert [w["holds"] for w in workers] == [version, version]
            ids, logprobs, spans = await reply(fleet)
            assert spans == [(0, 40, version)]
            assert_exact(policies, ids, logprobs, spans)
            # The version before is far enough off to be told apart.
            old = policies.logprobs(version - 1, PROMPT, ids)
            assert (old - logprobs).abs().max() > 100 * TOLERANCE

        # Replies that live through an update; several, so that on a fast machine too they are long enough.
        tensors = policies.tensors(3)
        calls = [asyncio.create_task(reply(fleet, 900)) for _ in range(16)]
        await until(lambda: engine.calls == len(calls))
        await sender.push(fleet.weights, 3, tensors)
        lived = [r for r in await asyncio.gather(*calls) if [v for _, _, v in r[2]] == [2, 3]]
        assert lived
        assert_exact(policies, *lived[0])
        sender.leave()
    finally:
        await fleet.stop()
