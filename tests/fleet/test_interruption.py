"""Replies that an update or a death interrupts: one reply to the client, and every span exact."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from fakes.policy import expected
from fakes.receivers import simulated_checksums
from fleet_kit import Harness, fake_fleet, run_config

from areal_agent.errors import EngineError, WeightUpdateError
from areal_agent.weights import plan
from areal_gateway.fleet import EngineSampling, resubmit

MANIFEST = plan([("w", "float32", (4,))], 16)
PROMPT = [5, 6, 7]
OLDER = ["generate", "completions"]


async def update(h: Harness, version: int) -> dict[str, Any]:
    store = {"host": "127.0.0.1", "port": 1}
    begun = await h.fleet.weights.begin(version=version, manifest=MANIFEST, store=store, backend="gloo")
    return await h.fleet.weights.commit(begun["update_id"], simulated_checksums(version, 1))


class Call:
    """A streaming call, read as it comes."""

    def __init__(self, h: Harness, n: int, session: str = "s", **sampling: Any) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float | None] = []
        self.ends: list[tuple[str | None, Any]] = []
        self.engines: list[str] = []
        extra = {"ignore_eos": True} | sampling.pop("extra", {})
        self.sampling = EngineSampling(max_tokens=n, temperature=0.0, extra=extra, **sampling)
        self.task = asyncio.create_task(self._read(h, session))

    async def _read(self, h: Harness, session: str) -> None:
        stream = h.fleet.generate(
            session_id=session, prompt_ids=PROMPT, sampling=self.sampling, on_engine=self.engines.append
        )
        async with aclosing(stream):
            async for chunk in stream:
                self.ids += chunk.token_ids
                self.logprobs += chunk.logprobs
                if chunk.finish_reason is not None or chunk.spans is not None:
                    self.ends.append((chunk.finish_reason, chunk.spans))

    async def assert_exact(self, versions: list[int]) -> None:
        """One end, and every token is what the policy of its span says, given all before it."""
        await self.task
        ((finish, spans),) = self.ends
        assert finish == "length"
        assert [v for _, _, v in spans] == versions
        assert len(self.ids) == self.sampling.max_tokens == spans[-1][1]
        at = 0
        for start, end, version in spans:
            assert start == at < end
            ids, logprobs = expected(PROMPT + self.ids[:start], end - start, version=version)
            assert (self.ids[start:end], self.logprobs[start:end]) == (ids, logprobs)
            at = end


# --- tokens computed a second time -------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [True, False], ids=["engine counts", "engine does not"])
async def test_what_is_kept_is_counted_as_the_engines_caches_held_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: bool
) -> None:
    """Not as it came: events hold 8 tokens, so up to 7 of each reply are sampled and not yet here."""
    async with fake_fleet(tmp_path, 2, step_s=0.003) as h:
        held: list[int] = []

        def watch(engine: Any) -> None:
            load = engine.receiver.areal_load

            def load_while_paused(arg: str) -> dict[str, Any]:
                held.extend(len(r.prompt) + len(r.tokens) - 1 for r in engine.running if r.tokens)
                return load(arg)

            monkeypatch.setattr(engine.receiver, "areal_load", load_while_paused)
            if not counts:
                monkeypatch.setattr(engine.receiver, "areal_progress", lambda _: {"sampled": None})

        for engine in h.engines:
            watch(engine)
        calls = [Call(h, 150 + 7 * i, f"s{i}") for i in range(6)]
        for version in (1, 2, 3):
            await h.until(lambda v=version: all(len(c.ids) > 30 * v + 3 for c in calls))
            await update(h, version)
        for call in calls:
            await call.assert_exact([0, 1, 2, 3])
        assert len(held) == 6 * 3
        kept = h.fleet.calls.prefilled_again["kept"]
        assert kept == sum(held) if counts else sum(held) - 7 * len(held) <= kept <= sum(held)


# --- an engine dies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [0, 1, 20])
async def test_a_reply_that_lived_through_updates_goes_on_exactly_when_its_engine_dies(
    tmp_path: Path, more: int
) -> None:
    """Its stamps were to come with the last chunk; it dies right after the update, or later."""
    async with fake_fleet(tmp_path, 2, step_s=0.003) as h:
        calls = [Call(h, 200, f"s{i}") for i in range(6)]
        await h.until(lambda: all(len(c.ids) > 20 for c in calls))
        await update(h, 1)
        await asyncio.sleep(0.05)
        await update(h, 2)
        lengths = [len(c.ids) for c in calls]
        await h.until(lambda: all(len(c.ids) >= n + more for c, n in zip(calls, lengths, strict=True)))
        h.engines[0].kill()
        for call in calls:
            await call.assert_exact([0, 1, 2])
        assert sorted(len(c.engines) for c in calls) == [1, 1, 1, 2, 2, 2]
        assert h.fleet.calls.prefilled_again["moved"] > 3 * 20
        assert h.fleet.calls.prefilled_again["kept"] > 2 * 6 * 20


async def test_versions_that_cannot_be_known_fail_the_call_rather_than_be_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_fleet(tmp_path, 2, step_s=0.003) as h:
        monkeypatch.setattr(h.engines[0].receiver, "areal_progress", lambda _: {"sampled": None})
        call, other = Call(h, 200, "s0"), Call(h, 200, "s1")
        await h.until(lambda: len(call.ids) > 20 and len(other.ids) > 20)
        await update(h, 1)
        h.engines[0].kill()
        with pytest.raises(EngineError, match=r"versions of .* tokens are unknown"):
            await call.task
        await other.assert_exact([0, 1])


async def test_counts_that_the_engines_own_stamps_contradict_are_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_fleet(tmp_path, 1, step_s=0.003) as h:
        receiver = h.engines[0].receiver
        honest = receiver.areal_progress
        lie = {"sampled": {}}

        def wrong(_: str) -> dict[str, Any]:
            lie["sampled"] = {id: n + 1 for id, n in honest()["sampled"].items()}
            return lie

        monkeypatch.setattr(receiver, "areal_progress", wrong)
        call = Call(h, 100)
        await h.until(lambda: len(call.ids) > 20)
        await update(h, 1)
        await call.assert_exact([0, 1])
        call = Call(h, 200)
        await h.until(lambda: len(call.ids) > 20)
        await update(h, 2)
        h.engines[0].kill()
        with pytest.raises(EngineError, match=r"versions of .* tokens are unknown"):
            await call.task


# --- engines that stamp nothing ----------------------------------------------------------------------------


@pytest.mark.parametrize("older", OLDER)
async def test_replies_outlive_updates_of_engines_without_spans(tmp_path: Path, older: str) -> None:
    async with fake_fleet(tmp_path, 2, step_s=0.003, older=older) as h:
        assert [e["driver"] for e in h.fleet.status()["engines"]] == ["resubmit"] * 2
        calls = [Call(h, 250, f"s{i}") for i in range(6)]
        for version in (1, 2, 3):
            await h.until(lambda v=version: all(len(c.ids) > 30 * v for c in calls))
            await update(h, version)
        for call in calls:
            await call.assert_exact([0, 1, 2, 3])
            assert len(set(call.engines)) == 1, "a session stays with its engine"
        sent = [len(body.get("token_ids") or body["prompt"]) for e in h.engines for body in e.requests]
        again = [n for n in sent if n > 30]
        assert len(again) == 6 * 3
        # All that is sent again was computed before, but for its last token.
        assert h.fleet.calls.prefilled_again["resubmitted"] == sum(again) - len(again)
        assert h.fleet.calls.prefilled_again["kept"] == 0


async def test_a_spans_engine_may_be_driven_as_an_older_one(tmp_path: Path) -> None:
    config = run_config(fleet={"driver": "resubmit"})
    async with fake_fleet(tmp_path, 1, config=config, step_s=0.003) as h:
        call = Call(h, 100)
        await h.until(lambda: len(call.ids) > 20)
        await update(h, 1)
        await call.assert_exact([0, 1])


async def test_an_older_engine_is_not_taken_for_one_with_spans(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"has no /update_weight_version, /weight_info; set fleet.driver"):
        async with fake_fleet(tmp_path, 1, config=run_config(fleet={"driver": "spans"}), older="generate"):
            pass


async def test_a_request_that_reached_the_engine_after_its_abort_is_not_given_the_old_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits there for the resume, and would then decode under weights that it was not labelled with."""
    monkeypatch.setattr(resubmit, "GRACE_S", 0.05)
    async with fake_fleet(tmp_path, 1, older="generate") as h:
        engine = h.engines[0]
        engine._go.clear()  # as if the abort had come just before the request
        call = Call(h, 30)
        await h.until(lambda: engine.running)
        monkeypatch.setattr(engine, "_pause", engine._resume)  # and so aborts nothing
        await update(h, 1)
        await call.assert_exact([1])


async def test_an_older_engines_version_is_what_its_workers_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(fleet={"max_restarts": 0})
    async with fake_fleet(tmp_path, 2, config=config, older="generate") as h:
        honest = h.engines[1].receiver.areal_status
        monkeypatch.setattr(h.engines[1].receiver, "areal_status", lambda _: honest() | {"holds": 0})
        assert (await update(h, 1))["engines"] == 1
        await h.until(lambda: h.states() == ["serving", "gone"])
        assert "its workers say they hold 0" in str(h.fleet.status()["engines"][1]["reason"])


async def test_budgets_and_seeds_are_carried_over_an_update(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1, step_s=0.003, older="generate") as h:
        call = Call(h, 100, seed=3, extra={"min_tokens": 50})
        await h.until(lambda: len(call.ids) > 20)
        await update(h, 1)
        await call.assert_exact([0, 1])
        first, second = (r["sampling_params"] for r in h.engines[0].requests[-2:])
        done = call.ends[0][1][0][1]
        assert second["max_tokens"] == 100 - done
        assert second["min_tokens"] == 50 - done
        assert second["seed"] != first["seed"]


async def test_what_cannot_be_carried_over_an_update_is_refused_in_words(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, 1, step_s=0.003, older="generate") as h:
        stops, penal = Call(h, 100, "a", stop=["x"]), Call(h, 100, "b", extra={"presence_penalty": 1.0})
        await h.until(lambda: len(stops.ids) > 20 and len(penal.ids) > 20)
        await update(h, 1)
        for call, word in ((stops, "stop string"), (penal, "presence_penalty")):
            with pytest.raises(EngineError, match=word):
                await call.task


async def test_an_update_that_is_dropped_after_the_abort_resubmits_under_the_old_version(
    tmp_path: Path,
) -> None:
    config = run_config(fleet={"max_restarts": 0})
    async with fake_fleet(tmp_path, 2, config=config, step_s=0.003, older="generate") as h:
        calls = [Call(h, 150, f"s{i}") for i in range(4)]
        await h.until(lambda: all(len(c.ids) > 20 for c in calls))
        h.engines[1].faults.http = {"/pause": "error"}
        with pytest.raises(WeightUpdateError):
            await update(h, 1)
        for call in calls:
            await call.assert_exact([0])
