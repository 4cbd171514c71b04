"""A retry gets the reply it repeats; the same prompt without evidence of one is another sample."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from gateway_support import Reply, Served, eventually, make_app

from areal_agent.errors import EngineError
from areal_gateway import exchange
from areal_gateway.tokens import Tokens

ASK = {"messages": [{"role": "user", "content": "What is two plus three?"}]}
AGAIN = {"x-stainless-retry-count": "1"}
FIRST = {"x-stainless-retry-count": "0"}


async def test_the_same_prompt_alone_is_another_sample(served: Served) -> None:
    session = await served.open()
    await served.post(session, ASK, FIRST)
    await served.post(session, ASK, FIRST)
    await served.post(session, ASK)
    assert len(served.fleet.asked) == 3


async def test_identical_prompts_at_once_are_siblings(served: Served) -> None:
    session = await served.open()
    await asyncio.gather(*(served.post(session, ASK, FIRST) for _ in range(4)))
    calls_ = (await served.inspect(session))["calls"]
    assert len(calls_) == 4
    assert {(c["parent_id"], c["branch_cause"]) for c in calls_} == {(None, "root")}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_is_replayed(served: Served, stream: bool) -> None:
    served.fleet.say("five", "six")
    session = await served.open()
    _, _, first = await served.post(session, {**ASK, "stream": stream}, FIRST)
    _, _, second = await served.post(session, {**ASK, "stream": stream}, AGAIN)
    if stream:
        assert b"five" in second
        assert second.endswith(b"[DONE]\n\n")
    else:
        assert second == first
    assert len(served.fleet.asked) == 1


async def test_a_retry_joins_the_call_in_flight(served: Served) -> None:
    gate = asyncio.Event()
    served.fleet.say(Reply("five", gate=gate))
    session = await served.open()
    first = asyncio.create_task(served.post(session, ASK, FIRST))
    await eventually(lambda: served.fleet.asked)
    second = asyncio.create_task(served.post(session, ASK, AGAIN))
    await eventually(lambda: served.gateway.calls.running == 1)
    await asyncio.sleep(0.05)
    gate.set()
    assert (await first)[2] == (await second)[2]
    assert len(served.fleet.asked) == 1


async def test_a_client_that_timed_out_and_retries_finds_its_call_still_running(served: Served) -> None:
    gate = asyncio.Event()
    served.fleet.say(Reply("five", gate=gate))
    session = await served.open()
    first = asyncio.create_task(served.post(session, ASK, FIRST))
    await eventually(lambda: served.fleet.asked)
    first.cancel()
    await asyncio.sleep(0.1)
    second = asyncio.create_task(served.post(session, ASK, AGAIN))
    await asyncio.sleep(0.05)
    gate.set()
    status, _, body = await second
    assert (status, body["choices"][0]["message"]["content"]) == (200, "five")
    assert [a.ended for a in served.fleet.asked] == ["done"]


async def test_a_client_that_never_comes_back_is_not_waited_for_long(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "RETRY_GRACE_S", 0.1)
    served.fleet.say(Reply("five", gate=asyncio.Event()))
    session = await served.open()
    first = asyncio.create_task(served.post(session, ASK, FIRST))
    await eventually(lambda: served.fleet.asked)
    first.cancel()
    await eventually(lambda: served.fleet.asked[0].ended == "cancelled")


async def test_a_retry_of_a_failure_is_a_new_call(served: Served) -> None:
    served.fleet.say(Reply("", finish=None, error=EngineError("no luck")), "five")
    session = await served.open()
    assert (await served.post(session, ASK, FIRST))[0] == 503
    status, _, body = await served.post(session, ASK, AGAIN)
    assert (status, body["choices"][0]["message"]["content"]) == (200, "five")
    assert [c["state"] for c in (await served.inspect(session))["calls"]] == ["failed", "complete"]


async def test_a_retry_with_another_body_is_a_new_call(served: Served) -> None:
    session = await served.open()
    await served.post(session, ASK, FIRST)
    await served.post(session, {**ASK, "max_tokens": 5}, AGAIN)
    assert len(served.fleet.asked) == 2


async def test_an_idempotency_key_is_evidence_enough(served: Served) -> None:
    session = await served.open()
    key = {"Idempotency-Key": "abc"}
    _, _, first = await served.post(session, ASK, key)
    _, _, second = await served.post(session, ASK, key)
    await served.post(session, ASK, {"Idempotency-Key": "other"})
    assert first == second
    assert len(served.fleet.asked) == 2


async def test_two_siblings_that_both_retry_get_both_replies(served: Served) -> None:
    served.fleet.say("one", "two")
    session = await served.open()
    firsts = await asyncio.gather(*(served.post(session, ASK, FIRST) for _ in range(2)))
    seconds = [await served.post(session, ASK, AGAIN) for _ in range(2)]
    ids = [{r[2]["id"] for r in group} for group in (firsts, seconds)]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 2


async def test_a_retry_after_a_restart_is_replayed_from_the_ledger(tokens: Tokens, tmp_path: Path) -> None:
    one = make_app(tokens, tmp_path)
    await one.start()
    one.fleet.say("five")
    session = await one.open()
    _, _, first = await one.post(session, {**ASK, "logprobs": True}, FIRST)
    await one.stop()
    two = make_app(tokens, tmp_path)
    await two.start()
    try:
        _, _, second = await two.post(session, {**ASK, "logprobs": True}, AGAIN)
        assert second["choices"] == first["choices"]
        assert second["id"] == first["id"]
        assert two.fleet.asked == []
    finally:
        await two.stop()


async def test_a_retried_reply_is_trained_once(served: Served) -> None:
    session = await served.open()
    await served.post(session, ASK, FIRST)
    await served.post(session, ASK, AGAIN)
    sealed = await served.seal(session, reward=1.0)
    assert sealed["trained_tokens"] == len(served.fleet.asked[0].output_ids)


@pytest.mark.parametrize("key", [{}, {"Idempotency-Key": "both"}])
async def test_a_failed_siblings_retry_is_not_given_the_other_ones_reply(
    served: Served, key: dict[str, str]
) -> None:
    served.fleet.say("one", Reply("", finish=None, error=EngineError("no luck")), "two")
    session = await served.open()
    if key:
        a = await served.post(session, ASK, FIRST)  # without the key: it is no candidate
        b = await served.post(session, ASK, FIRST | key)
    else:
        a, b = await asyncio.gather(*(served.post(session, ASK, FIRST) for _ in range(2)))
    assert sorted((a[0], b[0])) == [200, 503]
    got = a if a[0] == 200 else b
    status, _, body = await served.post(session, ASK, AGAIN | key)
    assert status == 200
    assert body["id"] != got[2]["id"]
    assert body["choices"][0]["message"]["content"] == "two"
    _, _, repeated = await served.post(session, ASK, {"x-stainless-retry-count": "2"} | key)
    assert len(served.fleet.asked) == 3, (
        "a failure is retried once; from then on its retry is what is repeated"
    )
    assert repeated["id"] in (body["id"], got[2]["id"])


async def test_a_failed_siblings_retry_leaves_a_running_sibling_to_its_own_client(served: Served) -> None:
    gate = asyncio.Event()
    served.fleet.say(Reply("one", gate=gate), Reply("", finish=None, error=EngineError("no luck")), "two")
    session = await served.open()
    first = asyncio.create_task(served.post(session, ASK, FIRST))
    await eventually(lambda: served.fleet.asked)
    assert (await served.post(session, ASK, FIRST))[0] == 503
    _, _, body = await served.post(session, ASK, AGAIN)
    gate.set()
    assert body["choices"][0]["message"]["content"] == "two"
    assert (await first)[2]["choices"][0]["message"]["content"] == "one"


async def test_a_retry_of_a_lost_reply_gets_it_though_a_sibling_failed(served: Served) -> None:
    gate = asyncio.Event()
    served.fleet.say(Reply("one", gate=gate), Reply("", finish=None, error=EngineError("no luck")), "two")
    session = await served.open()
    first = asyncio.create_task(served.post(session, ASK, FIRST))
    await eventually(lambda: served.fleet.asked)
    assert (await served.post(session, ASK, FIRST))[0] == 503
    first.cancel()
    await asyncio.sleep(0.1)
    gate.set()
    answers = [await served.post(session, ASK, AGAIN) for _ in range(2)]
    assert [a[2]["choices"][0]["message"]["content"] for a in answers] == ["one", "two"]
    assert len(served.fleet.asked) == 3
