"""The likeliest tokens beside the sampled one, in each API's own shape; the ledger keeps the sampled one's only."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_support import Asked, Served, likeliest, logprob

ASK = [{"role": "user", "content": "What is two plus three?"}]
REPLY = "two plus three"
TEXT = "message.output_text.logprobs"


def expected(served: Served, asked: Asked, k: int) -> list[list[tuple[str, float]]]:
    """What the fleet told, ids as text."""
    values: list[Any] = [logprob(asked.prompt_ids, i) for i in range(len(asked.output_ids))]
    tops = likeliest(asked.output_ids, values, k) or []
    return [[(served.gateway.tokens.text([t]), p) for t, p in top] for top in tops]


def told(entries: Any) -> list[list[tuple[str, float]]]:
    return [[(t.token, t.logprob) for t in e.top_logprobs] for e in entries]


@pytest.fixture(autouse=True)
def say(served: Served) -> None:
    served.fleet.say(REPLY)


@pytest.mark.parametrize("k", [0, 1, 20])
@pytest.mark.parametrize("stream", [False, True])
async def test_chat(served: Served, stream: bool, k: int) -> None:
    client = served.openai(await served.open())
    options = {"model": "m", "messages": ASK, "logprobs": True, "top_logprobs": k}
    if stream:
        entries = []
        async for chunk in await client.chat.completions.create(**options, stream=True):
            for choice in chunk.choices:
                entries += choice.logprobs.content if choice.logprobs else []
    else:
        entries = (await client.chat.completions.create(**options)).choices[0].logprobs.content
    (asked,) = served.fleet.asked
    assert asked.sampling.top_logprobs == k
    assert told(entries) == (expected(served, asked, k) if k else [[]] * len(asked.output_ids))
    assert [e.logprob for e in entries] == [
        logprob(asked.prompt_ids, i) for i in range(len(asked.output_ids))
    ]


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("stream", [False, True])
async def test_responses(served: Served, stream: bool, k: int) -> None:
    client = served.openai(await served.open())
    options = {"model": "m", "input": "two?", "include": [TEXT], "top_logprobs": k}
    if stream:
        events = [e async for e in await client.responses.create(**options, stream=True)]
        deltas = [x for e in events if e.type == "response.output_text.delta" for x in e.logprobs]
        entries = events[-1].response.output[0].content[0].logprobs
        assert told(deltas) == told(entries)[: len(deltas)]
    else:
        entries = (await client.responses.create(**options)).output[0].content[0].logprobs
    (asked,) = served.fleet.asked
    assert told(entries) == (expected(served, asked, k) if k else [[]] * len(asked.output_ids))


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_completions(served: Served, stream: bool, k: int) -> None:
    client = served.openai(await served.open())
    options = {"model": "m", "prompt": "one ", "logprobs": k}
    if stream:
        tops = []
        async for chunk in await client.completions.create(**options, stream=True):
            tops += chunk.choices[0].logprobs.top_logprobs
    else:
        tops = (await client.completions.create(**options)).choices[0].logprobs.top_logprobs
    (asked,) = served.fleet.asked
    assert tops == [dict(top) for top in expected(served, asked, k or 1)]


@pytest.mark.parametrize("k", [-1, 21, True, "3"])
async def test_more_than_the_api_has_is_refused(served: Served, k: Any) -> None:
    session = await served.open()
    status, _, body = await served.post(session, {"messages": ASK, "logprobs": True, "top_logprobs": k})
    assert status == 400
    assert "top_logprobs" in body["error"]["message"]


async def test_a_replay_tells_them_again(served: Served) -> None:
    session = await served.open()
    body = {"messages": ASK, "logprobs": True, "top_logprobs": 2}
    _, _, first = await served.post(session, body)
    _, _, again = await served.post(session, body, {"x-stainless-retry-count": "1"})
    assert again == first
    assert len(first["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2


async def test_siblings_have_their_own(served: Served) -> None:
    session = await served.open()
    body = {"messages": ASK, "logprobs": True, "top_logprobs": 2, "n": 3}
    _, _, whole = await served.post(session, body)
    for asked, choice in zip(served.fleet.asked, whole["choices"], strict=True):
        told_ = [
            [(t["token"], t["logprob"]) for t in e["top_logprobs"]] for e in choice["logprobs"]["content"]
        ]
        assert told_ == expected(served, asked, 2)


async def test_top_logprobs_that_nobody_would_see_are_refused_or_named(served: Served) -> None:
    session = await served.open()
    status, _, body = await served.post(session, {"messages": ASK, "top_logprobs": 2})
    assert (status, "needs logprobs: true" in body["error"]["message"]) == (400, True)
    assert (await served.post(session, {"messages": ASK, "top_logprobs": 0}))[0] == 200
    asked = {"input": "two?", "top_logprobs": 2}
    status, headers, _ = await served.post(session, asked, path="/v1/responses")
    assert (status, headers["x-areal-ignored"]) == (200, "top_logprobs")
    assert served.fleet.asked[-1].sampling.top_logprobs == 0
