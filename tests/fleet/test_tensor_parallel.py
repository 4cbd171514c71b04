"""An engine of two ranks: every worker is in the weight group, and its share of the model is the new one."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.sender import Sender
from fleet_kit import Policies
from real_kit import PROMPT, TOLERANCE, assert_exact, engine_config, reply, traffic

from areal_gateway.fleet import Fleet

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


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

        # Replies that live through an update: exact on both sides of the boundary.
        tensors = policies.tensors(3)
        async with traffic(fleet) as replies:
            await sender.push(fleet.weights, 3, tensors)
        assert [r for r in replies if [v for _, _, v in r[2]] == [2, 3]]
        for ids, logprobs, spans in replies:
            assert_exact(policies, ids, logprobs, spans)
        sender.leave()
    finally:
        await fleet.stop()
