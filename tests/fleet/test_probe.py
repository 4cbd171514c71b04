"""A probe asks every serving engine, and says which engine sampled what under which version."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.policy import expected
from fleet_kit import fake_fleet

from areal_agent.errors import EngineError
from areal_gateway.fleet import EngineSampling, probe

GREEDY = EngineSampling(max_tokens=6, temperature=0.0, extra={"ignore_eos": True})


async def test_every_serving_engine_answers_every_prompt(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2) as h:
        replies = await h.fleet.probe([[5, 6], [7]], GREEDY)
    assert sorted((r.engine, r.prompt_ids) for r in replies) == [
        ("attached-0", [5, 6]),
        ("attached-0", [7]),
        ("attached-1", [5, 6]),
        ("attached-1", [7]),
    ]
    for reply in replies:
        ids, logprobs = expected(reply.prompt_ids, 6)[:2]
        assert (reply.token_ids, reply.versions) == (ids, [0] * 6)
        assert reply.logprobs == logprobs


async def test_a_lost_engine_is_left_out_and_suspected(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2) as h:
        h.engines[1].kill()
        replies = await h.fleet.probe([[5, 6]], GREEDY)
        assert [r.engine for r in replies] == ["attached-0"]
        assert h.fleet.members[1].suspect.is_set()
        (event,) = [e for e in h.events if e["type"] == "probe_left_out"]
        assert event["engine"] == "attached-1"


async def test_a_busy_engine_is_left_out_and_not_suspected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PROBE_S", 0.3)
    async with fake_fleet(tmp_path, 2) as h:
        h.engines[1].faults.step_s = 1.0
        replies = await h.fleet.probe([[5, 6], [7]], GREEDY)
        assert {r.engine for r in replies} == {"attached-0"}
        assert not h.fleet.members[1].suspect.is_set()
        events = [(e["engine"], e["reason"]) for e in h.events if e["type"] == "probe_left_out"]
        assert events == [("attached-1", "it did not answer within 0.3 s")]


async def test_an_engine_that_stamps_no_version_is_an_error(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1) as h:
        h.engines[0].label = "default"
        with pytest.raises(EngineError, match="'default'"):
            await h.fleet.probe([[5, 6]], GREEDY)
