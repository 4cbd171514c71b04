"""Sessions over the admin plane: open, reward, seal, inspect, deadlines, restart."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from gateway_support import ADMIN_KEY, Reply, Served, eventually, make_app

from areal_gateway.ledger import LedgerError
from areal_gateway.tokens import Tokens

ASK = {"messages": [{"role": "user", "content": "What is two plus three?"}]}


async def test_opening_tells_all_there_is_to_know(served: Served) -> None:
    served.fleet.version = 3
    session = await served.open(group_id="g", group_size=2, deadline_s=9.0, labels={"split": "x"})
    assert session["base_url"] == served.url + "/v1"
    assert (session["opened_version"], session["deadline_s"], session["group_id"]) == (3, 9.0, "g")
    seen = await served.inspect(session)
    assert seen["labels"] == {"split": "x"}
    assert (seen["state"], seen["reward_state"], seen["calls"]) == ("open", "pending", [])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"purpose": "train"}, "task_id"),
        ({"task_id": "t"}, "purpose"),
        ({"task_id": "t", "purpose": "fun"}, "train, eval, rollout"),
        ({"task_id": "t", "purpose": "train", "group_size": 0}, "group_size"),
        ({"task_id": "t", "purpose": "train", "sampling": {"temperature": 0}}, "temperature 0"),
        ({"task_id": "t", "purpose": "eval", "sampling": {"temperature": -1}}, "temperature"),
        ({"task_id": "t", "purpose": "eval", "sampling": {"heat": 1}}, "heat"),
        ({"task_id": "t", "purpose": "eval", "deadline_s": "soon"}, "deadline_s"),
        ([], "object"),
    ],
)
async def test_bad_openings_get_a_sentence(served: Served, body: Any, says: str) -> None:
    status, answer = await served.admin("POST", "/admin/sessions", body, None)
    assert status == 400
    assert says in answer["error"]["message"]


class TestRewards:
    async def state(self, served: Served, session: Any) -> tuple[str, float | None]:
        seen = await served.inspect(session)
        return seen["reward_state"], seen["reward"]

    async def test_the_last_one_wins(self, served: Served) -> None:
        session = await served.open()
        await served.reward(session, 0.25, "a")
        await served.reward(session, 1, "b")
        assert await self.state(served, session) == ("set", 1.0)

    async def test_a_repeated_key_is_the_same_reward(self, served: Served) -> None:
        session = await served.open()
        await served.reward(session, 0.25, "a")
        await served.reward(session, 1.0, "b")
        await served.reward(session, 0.25, "a")
        assert await self.state(served, session) == ("set", 1.0)
        assert len((await served.inspect(session))["rewards"]) == 2

    async def test_missing_is_not_zero(self, served: Served) -> None:
        session = await served.open()
        await served.reward(session, None)
        assert await self.state(served, session) == ("missing", None)
        zero = await served.open()
        await served.reward(zero, 0)
        assert await self.state(served, zero) == ("set", 0.0)

    async def test_other_names_are_kept_apart(self, served: Served) -> None:
        session = await served.open()
        await served.reward(session, 1.0, "a")
        await served.reward(session, 9.0, "b", name="style")
        assert await self.state(served, session) == ("set", 1.0)

    @pytest.mark.parametrize("value", ["1", True, [1], {"v": 1}])
    async def test_what_is_no_number_is_refused(self, served: Served, value: Any) -> None:
        session = await served.open()
        path = f"/admin/sessions/{session['session_id']}/rewards"
        status, answer = await served.admin("POST", path, {"value": value, "key": "k"}, None)
        assert status == 400
        assert "value" in answer["error"]["message"]

    async def test_after_the_seal_only_a_repetition_is_accepted(self, served: Served) -> None:
        session = await served.open()
        await served.seal(session, reward=1.0)
        await served.reward(session, 1.0, "k")
        path = f"/admin/sessions/{session['session_id']}/rewards"
        status, answer = await served.admin("POST", path, {"value": 0.0, "key": "late"}, None)
        assert (status, answer["error"]["code"]) == (409, "session_sealed")
        assert await self.state(served, session) == ("set", 1.0)

    async def test_an_agent_rewards_its_own_session(self, served: Served) -> None:
        session = await served.open()
        _, _, reply = await served.post(session, ASK)
        headers = {"x-api-key": session["api_key"]}
        body = {"value": 0.5, "response_id": reply["id"]}
        async with served.http.post(served.url + "/v1/rewards", json=body, headers=headers) as r:
            assert r.status == 200
        seen = await served.inspect(session)
        assert (seen["reward"], seen["rewards"][0]["call_id"]) == (0.5, seen["calls"][0]["call_id"])

    async def test_an_agent_cannot_reward_a_response_of_another_session(self, served: Served) -> None:
        mine, other = await served.open(), await served.open()
        _, _, reply = await served.post(other, ASK)
        headers = {"x-api-key": mine["api_key"]}
        body = {"value": 0.5, "response_id": reply["id"]}
        async with served.http.post(served.url + "/v1/rewards", json=body, headers=headers) as r:
            assert r.status == 404


class TestSeal:
    async def test_it_sums_up(self, served: Served) -> None:
        session = await served.open()
        await served.post(session, ASK)
        await served.post(session, {**ASK, "max_tokens": 2})
        sealed = await served.seal(session, reward=1.0)
        assert sealed["state"] == "sealed"
        assert sealed["calls"] == {"complete": 1, "truncated": 1}
        assert (sealed["reward_state"], sealed["reward"]) == ("set", 1.0)
        assert sealed["trained_tokens"] == sum(len(a.output_ids) for a in served.fleet.asked)

    async def test_a_second_seal_changes_nothing(self, served: Served) -> None:
        session = await served.open()
        first = await served.seal(session, "failed")
        assert await served.seal(session, "finished") == first
        assert first["outcome"] == "failed"

    async def test_seals_at_once_are_one(self, served: Served) -> None:
        session = await served.open()
        answers = await asyncio.gather(*(served.seal(session) for _ in range(8)))
        assert all(a == answers[0] for a in answers)

    async def test_without_a_reward_it_is_missing(self, served: Served) -> None:
        sealed = await served.seal(await served.open())
        assert (sealed["reward_state"], sealed["reward"]) == ("missing", None)

    async def test_calls_in_flight_are_aborted_and_told(self, served: Served) -> None:
        served.fleet.say(Reply("never", gate=asyncio.Event()))
        session = await served.open()
        call = asyncio.create_task(served.post(session, ASK))
        await eventually(lambda: served.fleet.asked)
        sealed = await served.seal(session, "timeout")
        assert sealed["calls"] == {"aborted": 1}
        assert sealed["trained_tokens"] == 0
        status, _, answer = await call
        assert (status, answer["error"]["code"]) == (409, "session_sealed")
        assert served.fleet.asked[0].ended == "cancelled"

    async def test_later_calls_are_refused(self, served: Served) -> None:
        session = await served.open()
        await served.seal(session)
        status, _, answer = await served.post(session, ASK)
        assert (status, answer["error"]["code"]) == (409, "session_sealed")

    async def test_memory_of_a_sealed_session_is_let_go_and_the_ledger_answers(self, served: Served) -> None:
        session = await served.open()
        await served.post(session, ASK)
        before = await served.inspect(session, trajectory=True)
        await served.seal(session)
        assert served.gateway.sessions.open_count == 0
        after = await served.inspect(session, trajectory=True)
        for call in before["calls"]:
            assert call["reward_state"] == "pending"
            call["reward_state"] = "missing"  # the seal is what makes it so
        assert after["calls"] == before["calls"]
        assert after["sequences"] == before["sequences"]


class TestIncomplete:
    """An incomplete call is given to the agent, kept as context, and never trained."""

    @pytest.mark.parametrize(
        ("reply", "says"),
        [
            (Reply("five", drop_logprob=1), "logprob None"),
            (Reply("five", no_spans=True), "cover 0 of"),
            (Reply("five", spans=[(0, 1, 0)]), "cover 1 of"),
            (Reply("five", spans=[(1, 5, 0)]), "in order"),
        ],
    )
    async def test_it_says_why(self, served: Served, reply: Reply, says: str) -> None:
        served.fleet.say(reply)
        session = await served.open()
        status, _, body = await served.post(session, ASK)
        assert (status, body["choices"][0]["message"]["content"]) == (200, "five")
        (call,) = (await served.inspect(session))["calls"]
        assert call["state"] == "incomplete"
        assert says in call["incomplete_reason"]
        sealed = await served.seal(session, reward=1.0)
        assert sealed["trained_tokens"] == 0

    async def test_a_later_call_is_trained_after_it(self, served: Served) -> None:
        served.fleet.say(Reply("five", drop_logprob=0), "sure")
        session = await served.open()
        _, _, body = await served.post(session, ASK)
        messages = [*ASK["messages"], body["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
        await served.post(session, {"messages": messages})
        sealed = await served.seal(session, reward=1.0)
        assert sealed["trained_tokens"] == len(served.fleet.asked[1].output_ids)
        (sequence,) = (await served.inspect(session, trajectory=True))["sequences"]
        asked = served.fleet.asked[1]
        assert sequence["token_ids"] == asked.prompt_ids + asked.output_ids


async def test_every_token_has_the_version_the_engine_stamped(served: Served) -> None:
    n = len(served.fleet.encode("a longer reply")) + 1
    served.fleet.say(Reply("a longer reply", spans=[(0, 2, 0), (2, n, 1)]))
    session = await served.open()
    await served.post(session, ASK)
    seen = await served.inspect(session, trajectory=True)
    versions = [{"version": 0, "start": 0, "end": 2}, {"version": 1, "start": 2, "end": n}]
    assert seen["calls"][0]["versions"] == versions
    prompt = len(served.fleet.asked[0].prompt_ids)
    assert seen["sequences"][0]["versions"] == [-1] * prompt + [0, 0] + [1] * (n - 2)


class TestDeadline:
    async def test_calls_end_at_it_and_the_session_some_grace_later(
        self, tokens: Tokens, tmp_path: Path
    ) -> None:
        served = make_app(tokens, tmp_path, rollout={"reward_timeout_s": 0.5})
        await served.start()
        try:
            served.fleet.say(Reply("never", gate=asyncio.Event()))
            session = await served.open(deadline_s=0.3)
            status, _, answer = await served.post(session, ASK)
            assert (status, answer["error"]["code"]) == (409, "session_deadline")
            status, _, answer = await served.post(session, ASK)
            assert (status, answer["error"]["code"]) == (409, "session_deadline")
            await served.reward(session, 1.0)  # a verifier may still be running
            await eventually(lambda: served.gateway.sessions.open_count == 0)
            seen = await served.inspect(session)
            assert (seen["state"], seen["outcome"], seen["reward"]) == ("sealed", "timeout", 1.0)
            assert [c["state"] for c in seen["calls"]] == ["aborted"]
        finally:
            await served.stop()

    async def test_a_call_has_a_deadline_of_its_own(self, served: Served) -> None:
        served.gateway.calls._timeout_s = 0.1
        served.fleet.say(Reply("never", gate=asyncio.Event()))
        session = await served.open()
        status, _, answer = await served.post(session, ASK)
        assert (status, answer["error"]["code"]) == (504, "call_timeout")
        (call,) = (await served.inspect(session))["calls"]
        assert call["state"] == "aborted"


async def test_a_conversation_goes_on_after_a_restart(tokens: Tokens, tmp_path: Path) -> None:
    one = make_app(tokens, tmp_path)
    await one.start()
    one.fleet.say("five")
    session = await one.open()
    _, _, body = await one.post(session, ASK)
    asked = one.fleet.asked[0]
    await one.stop()

    two = make_app(tokens, tmp_path)
    await two.start()
    try:
        session["base_url"] = two.url + "/v1"
        messages = [*ASK["messages"], body["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
        await two.openai(session).chat.completions.create(model="m", messages=messages)
        stored = asked.prompt_ids + asked.output_ids
        assert two.fleet.asked[0].prompt_ids[: len(stored)] == stored
        sealed = await two.seal(session, reward=1.0)
        assert sealed["trained_tokens"] == len(asked.output_ids) + len(two.fleet.asked[0].output_ids)
    finally:
        await two.stop()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_cannot_be_recorded_is_not_given(
    served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await served.open()
    append = served.ledger.append

    def broken(*rows: Any) -> Any:
        if rows and "INTO tool_lists" in rows[0][0]:
            failed = asyncio.get_running_loop().create_future()
            failed.set_exception(LedgerError("disk full"))
            return failed
        return append(*rows)

    monkeypatch.setattr(served.ledger, "append", broken)
    status, _, body = await served.post(session, {**ASK, "stream": stream})
    if stream:
        assert b"disk full" in body
        assert b"[DONE]" not in body
    else:
        assert (status, body["error"]["code"]) == (500, "ledger_error")


async def test_the_reply_is_in_the_ledger_before_the_client_has_its_end(served: Served) -> None:
    session = await served.open()
    await served.post(session, ASK)
    calls = served.ledger.histories([session["session_id"]])[session["session_id"]].calls
    assert [c.state for c in calls] == ["complete"]


async def test_events_tell_what_happens(served: Served) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with served.http.get(served.url + "/admin/events", headers=headers) as r:
        await r.content.readuntil(b"\n\n")
        session = await served.open()
        await served.post(session, ASK)
        await served.seal(session)
        types = []
        while "session_sealed" not in types:
            line = await r.content.readuntil(b"\n\n")
            if line.startswith(b"data: "):
                types.append(json.loads(line[6:])["type"])
    assert types == ["session_opened", "call", "group_void", "session_sealed"]


async def test_status_and_metrics(served: Served) -> None:
    session = await served.open()
    await served.post(session, ASK)
    await served.admin("POST", "/admin/metrics", {"step": 4, "loss": 0.5})
    status = await served.admin("GET", "/admin/status")
    assert status["calls"] == {
        "total": 1,
        "complete": 1,
        "truncated": 0,
        "aborted": 0,
        "incomplete": 0,
        "constrained": 0,
        "failed": 0,
        "running": 0,
    }
    assert status["trainer"] == {"step": 4, "loss": 0.5}
    assert status["tokens_sampled"] == len(served.fleet.asked[0].output_ids)
    async with served.http.get(served.url + "/metrics") as r:
        text = await r.text()
    assert 'areal_calls_total{state="complete"} 1.0' in text


class TestWeights:
    BEGIN: ClassVar[dict[str, Any]] = {
        "version": 1,
        "manifest": {"buckets": []},
        "store": {"host": "127.0.0.1", "port": 29500},
        "backend": "gloo",
    }

    async def test_begin_and_commit_make_the_next_version(self, served: Served) -> None:
        begun = await served.admin("POST", "/admin/weights/begin", self.BEGIN)
        assert set(begun) == {"update_id", "epoch", "world_size", "join"}
        done = await served.admin(
            "POST", "/admin/weights/commit", {"update_id": begun["update_id"], "checksums": []}
        )
        assert done["version"] == 1
        assert (await served.open())["opened_version"] == 1

    async def test_refusals_say_whether_to_try_again(self, served: Served) -> None:
        status, body = await served.admin("POST", "/admin/weights/begin", {**self.BEGIN, "version": 5}, None)
        assert (status, body["error"]["code"]) == (409, "weights_conflict")
        status, body = await served.admin(
            "POST", "/admin/weights/commit", {"update_id": "u", "checksums": []}, None
        )
        assert (status, body["error"]["code"]) == (409, "weights_retry")

    @pytest.mark.parametrize("field", ["version", "manifest", "store", "backend"])
    async def test_what_is_missing_is_named(self, served: Served, field: str) -> None:
        body = {k: v for k, v in self.BEGIN.items() if k != field}
        status, answer = await served.admin("POST", "/admin/weights/begin", body, None)
        assert status == 400
        assert field in answer["error"]["message"]


async def test_a_stopping_gateway_tells_who_waits_and_writes_it_down(tokens: Tokens, tmp_path: Path) -> None:
    served = make_app(tokens, tmp_path)
    await served.start()
    served.fleet.say(Reply("never", gate=asyncio.Event()))
    session = await served.open()
    call = asyncio.create_task(served.post(session, ASK))
    await eventually(lambda: served.fleet.asked)
    async with asyncio.timeout(2.0):
        await served.server.close()
    status, _, body = await call
    assert (status, body["error"]["code"]) == (503, "stopping")
    await served.ledger.append()
    history = served.ledger.histories([session["session_id"]])[session["session_id"]]
    assert [c.state for c in history.calls] == ["aborted"]
    await served.stop()


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 20}])
@pytest.mark.parametrize("whose", ["session", "run"])
async def test_a_cut_distribution_is_not_trained(
    tokens: Tokens, tmp_path: Path, cut: dict[str, Any], whose: str
) -> None:
    served = make_app(tokens, tmp_path, **({"sampling": cut} if whose == "run" else {}))
    await served.start()
    try:
        body = {"task_id": "t", "purpose": "train"} | ({"sampling": cut} if whose == "session" else {})
        refused = await served.admin("POST", "/admin/sessions", body, 400)
        assert "the trainer cannot compute the logprobs" in refused["error"]["message"]
        await served.admin("POST", "/admin/sessions", body | {"purpose": "eval"}, 201)
        whole = {"top_p": 1.0, "top_k": 0}
        await served.admin("POST", "/admin/sessions", body | {"sampling": whole}, 201)
    finally:
        await served.stop()


async def test_label_headers_are_decoded(served: Served) -> None:
    session = await served.open()
    labels = {"x-areal-label-role": "Pr%C3%BCfer%0A50%25", "x-areal-label-plain": "a b"}
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert (await served.post(session, body, labels))[0] == 200
    (call,) = (await served.inspect(session))["calls"]
    assert call["labels"] == {"role": "Prüfer\n50%", "plain": "a b"}
