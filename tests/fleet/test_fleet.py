"""Routing, continuation of a reply whose engine was lost, holding, health: on in-process fakes."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fakes.engine import FakeEngine
from fakes.policy import Reply, expected
from fleet_kit import Harness, fake_fleet, run_config
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.errors import ConfigError, EngineError
from areal_gateway.fleet import EngineSampling, Fleet, FleetUnavailable
from areal_gateway.fleet.continuation import merge_spans

PROMPT = [5, 6, 7]
GREEDY = EngineSampling(max_tokens=60, temperature=0.0, extra={"ignore_eos": True})


async def run(
    h: Harness, session: str = "s", sampling: EngineSampling = GREEDY, prompt: list[int] = PROMPT
) -> dict[str, Any]:
    engines: list[str] = []
    out: dict[str, Any] = {"ids": [], "logprobs": [], "engines": engines}
    async with aclosing(
        h.fleet.generate(session_id=session, prompt_ids=prompt, sampling=sampling, on_engine=engines.append)
    ) as stream:
        async for chunk in stream:
            out["ids"] += chunk.token_ids
            out["logprobs"] += chunk.logprobs
            out["finish"], out["spans"] = chunk.finish_reason, chunk.spans
    return out


# --- routing ---------------------------------------------------------------------------------------------


async def test_a_session_stays_on_its_engine_and_sessions_spread(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2) as h:
        where: dict[str, set[str]] = {}
        for _ in range(3):
            for s in range(8):
                where.setdefault(f"s{s}", set()).update((await run(h, f"s{s}"))["engines"])
        assert all(len(engines) == 1 for engines in where.values())
        assert Counter(e for engines in where.values() for e in engines) == {"attached-0": 4, "attached-1": 4}


async def test_concurrent_sessions_go_to_the_least_loaded(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 3, step_s=0.002) as h:
        results = await asyncio.gather(*(run(h, f"s{i}") for i in range(12)))
        assert set(Counter(r["engines"][0] for r in results).values()) == {4}


async def test_a_full_engine_gives_its_sessions_away(tmp_path: Path) -> None:
    config = run_config(fleet={"max_num_seqs": 2})
    async with fake_fleet(tmp_path, 2, config=config, step_s=0.002) as h:
        results = await asyncio.gather(*(run(h, "one session") for _ in range(4)))
        assert sorted(Counter(r["engines"][0] for r in results).values()) == [2, 2]


async def test_running_calls_are_counted_down_whatever_their_end(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1, step_s=0.002) as h:
        await run(h)
        h.engines[0].faults.generate_status = 500  # tried again, as it may be lost, until its chances end
        with pytest.raises(EngineError, match="injected fault"):
            await run(h)
        h.engines[0].faults.generate_status = None
        left = asyncio.create_task(run(h))
        await h.until(lambda: h.fleet.status()["engines"][0]["running"] == 1)
        left.cancel()
        await h.until(lambda: h.fleet.status()["engines"][0]["running"] == 0)
        await h.until(lambda: not h.engines[0].running)
        assert h.engines[0].disconnects == 1


# --- what a reply is -------------------------------------------------------------------------------------


async def test_a_missing_logprob_is_none_in_its_place(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1) as h:
        h.engines[0].faults.drop_logprob_at = 9
        out = await run(h)
        want = expected(PROMPT, 60)[1]
        assert out["logprobs"][9] is None
        assert out["logprobs"][:9] + out["logprobs"][10:] == pytest.approx(want[:9] + want[10:])


@pytest.mark.parametrize("missing", [-9999.0, None])
async def test_a_logprob_that_cannot_be_of_a_sampled_token_is_none(
    tmp_path: Path, missing: float | None
) -> None:
    async with fake_fleet(tmp_path, 1) as h:
        h.engines[0].script.append(Reply([4, 5, 6], logprobs=[-0.5, missing, -0.25]))
        assert (await run(h))["logprobs"] == [-0.5, None, -0.25]


async def test_an_engines_refusal_is_passed_on_with_its_reason_and_not_retried(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2, max_model_len=100) as h:
        before = [len(e.requests) for e in h.engines]
        with pytest.raises(EngineError, match="prompt of 200 tokens does not fit 100"):
            await run(h, prompt=[1] * 200)
        assert sum(len(e.requests) for e in h.engines) - sum(before) == 1


async def test_an_error_inside_a_stream_that_repeats_everywhere_fails_the_call(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2) as h:
        for e in h.engines:
            e.faults.error_after = 1
        with pytest.raises(EngineError, match="failed after"):
            await run(h)
        assert h.states() == ["serving", "serving"]


async def test_a_version_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1) as h:
        h.engines[0].label = "default"
        with pytest.raises(EngineError, match="'default'"):
            await run(h)


async def test_a_call_has_a_deadline(tmp_path: Path) -> None:
    config = run_config(fleet={"call_timeout_s": 0.3})
    async with fake_fleet(tmp_path, 1, config=config) as h:
        h.engines[0].faults.step_s = 0.05
        with pytest.raises(EngineError, match="call_timeout_s"):
            await run(h)
        await h.until(lambda: not h.engines[0].running)


async def test_a_closed_pooled_connection_is_not_an_error(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1) as h:
        await run(h)
        runner = h.engines[0]._runner
        assert runner is not None
        assert runner.server is not None
        for connection in list(runner.server.connections):
            assert connection.transport is not None
            connection.transport.close()
        assert (await run(h))["finish"] == "length"


# --- losing an engine mid-reply --------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 7, 8, 9, 31, 59])
async def test_a_reply_goes_on_elsewhere_token_for_token(tmp_path: Path, after: int) -> None:
    async with fake_fleet(tmp_path, 2) as h:
        h.engines[0].faults.die_after = after
        out = await run(h)
        want_ids, want_logprobs = expected(PROMPT, 60)
        assert out["ids"] == want_ids
        assert out["logprobs"] == pytest.approx(want_logprobs)
        assert (out["finish"], out["spans"]) == ("length", [(0, 60, 0)])
        assert out["engines"] == ["attached-0", "attached-1"]
        last = h.engines[1].requests[-1]
        assert last["sampling_params"]["max_tokens"] == 60 - (len(last["token_ids"]) - len(PROMPT))
        await h.until(lambda: h.states()[0] == "gone")


async def test_an_engine_that_says_it_failed_mid_reply_is_lost(tmp_path: Path) -> None:
    """As vLLM does when its core dies: the stream gets an error event."""
    config = run_config(fleet={"probe_s": 60})
    async with fake_fleet(tmp_path, 2, config=config) as h:
        h.engines[0].faults.error_after = 20
        h.engines[0].faults.http = {"/health": "error"}
        out = await run(h)
        assert out["ids"] == expected(PROMPT, 60)[0]
        assert (out["finish"], out["spans"]) == ("length", [(0, 60, 0)])
        assert out["engines"] == ["attached-0", "attached-1"]
        await h.until(lambda: h.states()[0] == "gone")


async def test_a_call_that_an_engine_answers_with_500_is_made_elsewhere(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2) as h:
        h.engines[0].faults.generate_status = 500
        out = await run(h)
        assert (out["ids"], out["engines"]) == (expected(PROMPT, 60)[0], ["attached-0", "attached-1"])


async def test_a_dead_engines_calls_all_move_before_it_is_found_dead(tmp_path: Path) -> None:
    """The dead engine has the fewest calls now; sending them there again would use up their chances."""
    config = run_config(fleet={"probe_s": 60})
    async with fake_fleet(tmp_path, 2, config=config, step_s=0.002) as h:
        calls = [asyncio.create_task(run(h, f"s{i}")) for i in range(8)]
        await h.until(lambda: all(len(e.running) == 4 for e in h.engines))
        h.engines[0].kill()
        for out in await asyncio.gather(*calls):
            assert out["ids"] == expected(PROMPT, 60)[0]
            assert out["engines"][-1] == "attached-1"
            assert len(out["engines"]) <= 2


async def test_a_single_engine_that_cut_a_stream_is_probed_and_used_again(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1) as h:
        h.engines[0].faults.cut_after = 20
        out = await run(h)
        assert out["ids"] == expected(PROMPT, 60)[0]
        assert len(out["engines"]) > 1


async def test_a_stream_cut_by_a_living_engine_goes_on_too(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2) as h:
        h.engines[0].faults.cut_after = 20
        out = await run(h)
        assert out["ids"] == expected(PROMPT, 60)[0]
        assert h.states() == ["serving", "serving"]


async def test_a_cut_that_repeats_everywhere_ends_the_call(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2) as h:
        for e in h.engines:
            e.faults.cut_after = 1
        with pytest.raises(EngineError, match=r"cut|lost"):
            await run(h)


async def test_a_continued_reply_that_needs_its_own_past_fails_clearly(tmp_path: Path) -> None:
    for sampling, word in (
        (EngineSampling(60, temperature=0.0, stop=["x"]), "stop string"),
        (EngineSampling(60, temperature=0.0, extra={"frequency_penalty": 0.5}), "frequency_penalty"),
    ):
        async with fake_fleet(tmp_path, 2) as h:
            h.engines[0].faults.die_after = 20
            with pytest.raises(EngineError, match=word):
                await run(h, sampling=sampling)


async def test_a_seeded_continuation_does_not_repeat_its_draws(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2) as h:
        h.engines[0].faults.die_after = 20
        await run(h, sampling=EngineSampling(60, temperature=1.0, seed=3))
        seeds = [r["sampling_params"]["seed"] for e in h.engines for r in e.requests[-1:]]
        assert seeds[0] != seeds[1]


@given(
    st.lists(st.integers(1, 9), max_size=8), st.lists(st.integers(0, 2), min_size=8, max_size=8), st.data()
)
def test_merged_spans_say_for_every_token_what_its_part_said(lengths, versions, data) -> None:
    spans, at = [], 0
    for n, v in zip(lengths, versions, strict=False):
        spans.append((at, at + n, v))
        at += n
    cut = data.draw(st.integers(0, len(spans)))
    merged = merge_spans(merge_spans([], spans[:cut]), spans[cut:])

    def per_token(ss: list[tuple[int, int, int]]) -> list[int]:
        return [v for a, b, v in ss for _ in range(a, b)]

    assert per_token(merged) == per_token(spans)
    assert [a for a, _, _ in merged] == [0, *[b for _, b, _ in merged]][: len(merged)]
    assert all(x[2] != y[2] for x, y in pairwise(merged))


# --- health, holding -------------------------------------------------------------------------------------


async def test_calls_wait_while_held_and_go_on_after(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1) as h:
        h.fleet.hold()
        call = asyncio.create_task(run(h))
        await asyncio.sleep(0.05)
        assert not h.engines[0].running
        assert not call.done()
        h.fleet.release()
        assert (await call)["finish"] == "length"


async def test_without_engines_calls_wait_and_then_say_why(tmp_path: Path) -> None:
    config = run_config(gateway={"hold_timeout_s": 0.5}, fleet={"max_restarts": 0})
    async with fake_fleet(tmp_path, 1, config=config) as h:
        h.engines[0].kill()
        await h.until(lambda: h.states() == ["gone"])
        with pytest.raises(FleetUnavailable, match=r"no engine served within 0.5 s: attached-0 is gone"):
            await run(h)


async def test_an_engine_that_reports_itself_dead_is_taken_out_at_the_next_probe(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2) as h:
        h.engines[0].faults.http = {"/health": "error"}
        await h.until(lambda: h.states() == ["gone", "serving"])
        assert {tuple((await run(h, f"s{i}"))["engines"]) for i in range(4)} == {("attached-1",)}
        h.engines[0].faults.http = {}
        await h.until(lambda: h.states() == ["serving", "serving"])


async def test_an_engine_that_fails_too_often_stays_out_and_says_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("areal_gateway.fleet.member.BACKOFF_S", 0.05)
    config = run_config(fleet={"start_timeout_s": 0.3})
    async with fake_fleet(tmp_path, 2, config=config) as h:
        h.engines[0].kill()
        await h.until(lambda: "restarts used up" in h.fleet.status()["engines"][0]["reason"])
        assert h.states() == ["gone", "serving"]
        assert h.fleet.status()["engines"][0]["restarts"] == 2


async def test_state_changes_are_events(tmp_path: Path) -> None:
    config = run_config(fleet={"max_restarts": 0})
    async with fake_fleet(tmp_path, 1, config=config) as h:
        h.engines[0].kill()
        await h.until(lambda: h.states() == ["gone"])
        states = [e["state"] for e in h.events if e["type"] == "engine"]
        assert states[:2] == ["serving", "gone"]


async def test_engines_of_different_versions_are_not_attached(tmp_path: Path) -> None:
    async with FakeEngine() as a, FakeEngine() as b:
        a.set_version(3)
        config = run_config(fleet={"attach": [a.url, b.url]})
        fleet = Fleet(config, tmp_path, lambda _: None)
        with pytest.raises(ConfigError, match="different versions"):
            await fleet.start()


async def test_an_address_where_nothing_listens_is_a_sentence(tmp_path: Path) -> None:
    config = run_config(fleet={"attach": ["http://127.0.0.1:9"], "start_timeout_s": 0.5})
    fleet = Fleet(config, tmp_path, lambda _: None)
    with pytest.raises(EngineError, match=r"cannot attach http://127.0.0.1:9"):
        await fleet.start()


async def test_status_has_what_the_admin_plane_promises(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 2) as h:
        status = h.fleet.status()
        assert status["version"] == 0
        assert status["state"] == "serving"
        for engine in status["engines"]:
            assert engine.keys() >= {"id", "url", "state", "version", "running", "pid"}
