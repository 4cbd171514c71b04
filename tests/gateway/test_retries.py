"""A retry gets the reply it repeats; the same prompt without evidence of one is another sample."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from gateway_support import Reply, Served, eventually, make_app

from areal_agent.errors import EngineError
from areal_gateway import agent, exchange
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


class Flaky(httpx2.AsyncBaseTransport):
    """The network loses one request: its answer after it was given, or, `early`, the wait for it."""

    def __init__(self, lost: int, early: asyncio.Event | None) -> None:
        self.inner = httpx2.AsyncHTTPTransport()
        self.lost = lost
        self.early = early
        self.requests = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.requests += 1
        if self.requests != self.lost:
            return await self.inner.handle_async_request(request)
        waiting = asyncio.create_task(self.inner.handle_async_request(request))
        if self.early is not None:
            await self.early.wait()
            waiting.cancel()
            raise httpx2.ReadTimeout("nothing came in time")
        await (await waiting).aread()
        raise httpx2.ReadError("the connection was lost")

    async def aclose(self) -> None:
        await self.inner.aclose()


@pytest.mark.parametrize("lost", [1, 5, 8])
@pytest.mark.parametrize("early", [False, True])
async def test_of_8_identical_prompts_at_once_one_is_retried_by_the_sdk_and_there_are_8(
    served: Served, lost: int, early: bool
) -> None:
    session = await served.open()
    gone, gate = asyncio.Event(), asyncio.Event()
    served.fleet.say(*(Reply(f"reply {i}", gate=gate) for i in range(8)))
    transport = Flaky(lost, gone if early else None)
    client = served.openai(session, http_client=httpx2.AsyncClient(transport=transport))
    asking = [
        asyncio.create_task(client.chat.completions.create(model="m", messages=ASK["messages"]))
        for _ in range(8)
    ]
    await eventually(lambda: len(served.fleet.asked) == 8)
    gone.set()
    if early:
        await eventually(lambda: transport.requests == 9)
    gate.set()
    replies = await asyncio.gather(*asking)
    assert (transport.requests, len(served.fleet.asked)) == (9, 8)
    # An answer that is lost on its way looks delivered: then nobody can say which of the 8 the retry is of.
    assert len({r.id for r in replies}) >= (8 if early else 7)
    calls_ = (await served.inspect(session))["calls"]
    assert [c["state"] for c in calls_] == ["complete"] * 8
    sealed = await served.seal(session, reward=1.0)
    assert sealed["trained_tokens"] == sum(len(a.output_ids) for a in served.fleet.asked)


class TestWhatARetryCannotHelp:
    """OpenAI's and Anthropic's SDKs retry a 409 by themselves; `x-should-retry` tells them not to."""

    @pytest.mark.parametrize("kind", ["openai", "anthropic"])
    async def test_a_sealed_session_is_told_once(
        self, served: Served, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        session = await served.open()
        await served.seal(session)
        tried: list[int] = []
        monkeypatch.setattr(agent, "authenticate", _counting(agent.authenticate, tried))
        if kind == "openai":
            with pytest.raises(openai.ConflictError, match="sealed"):
                await served.openai(session).chat.completions.create(model="m", messages=ASK["messages"])
        else:
            with pytest.raises(anthropic.ConflictError, match="sealed"):
                await served.anthropic(session).messages.create(
                    model="m", max_tokens=9, messages=ASK["messages"]
                )
        assert len(tried) == 1

    @pytest.mark.parametrize(
        ("path", "body", "key", "status"),
        [
            ("/v1/chat/completions", {"messages": []}, None, 400),
            ("/v1/responses", {"input": "x" * 20000}, None, 400),
            ("/v1/messages", {"messages": ASK["messages"]}, None, 400),
            ("/v1/completions", {"prompt": "a", "echo": True}, None, 400),
            ("/v1/chat/completions", ASK, "wrong", 401),
            ("/v1/nothing", ASK, None, 404),
            ("/v1/rewards", {"response_id": "chatcmpl-nobody", "value": 1}, None, 404),
        ],
    )
    async def test_every_lasting_refusal_says_so(
        self, served: Served, path: str, body: Any, key: str | None, status: int
    ) -> None:
        session = await served.open()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        got, told, _ = await served.post(session, body, headers, path=path)
        assert (got, told["x-should-retry"]) == (status, "false")

    async def test_a_failed_engine_may_be_asked_again(self, served: Served) -> None:
        served.fleet.say(Reply("", finish=None, error=EngineError("no luck")))
        status, told, _ = await served.post(await served.open(), ASK)
        assert (status, "x-should-retry" in told) == (503, False)


def _counting(function: Any, counter: list[int]) -> Any:
    async def counted(*args: Any) -> Any:
        counter.append(1)
        return await function(*args)

    return counted
