"""Streams: the deltas, joined, are the whole reply; and what happens while one waits or breaks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from gateway_support import CALCULATOR, Reply, Served, eventually, logprob, tool_call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_agent.config import GatewayConfig
from areal_agent.errors import EngineError
from areal_gateway import agent
from areal_gateway.reply import Pace, ReplyFormat, ReplyStream, deltas_of, read_reply
from areal_gateway.tokens import Tokens

ASK = [{"role": "user", "content": "What is two plus three?"}]


def joined(deltas: Any) -> tuple[str, str, list[Any]]:
    """(reasoning, content, tool calls) of a stream."""
    deltas = list(deltas)
    calls = sorted((d.index, d.tool_call) for d in deltas if d.tool_call is not None)
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), [c for _, c in calls]


PIECES = st.sampled_from(
    [
        "Hello",
        " world",
        "\n\n",
        " ",
        "naïve ☃ 漢字",
        "STOP",
        "ST",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        tool_call(),
        tool_call("other", "[1, 2]"),
        "<tool_call>\n{broken\n</tool_call>",
        '{"name": "calculator"}',
        "<|im_start|>",
    ]
)


@pytest.mark.parametrize("thinking", [False, True])
@given(
    pieces=st.lists(PIECES, max_size=8),
    chunk=st.integers(1, 7),
    parse_tools=st.booleans(),
    stop=st.sampled_from([(), ("STOP",), ("world", "STOP")]),
    end=st.booleans(),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_stream_joined_is_the_whole_reply(
    model_folder: Any, thinking: bool, pieces: list[str], chunk: int, parse_tools: bool, stop: Any, end: bool
) -> None:
    tokens = _tokens(model_folder, thinking)
    prompt = tokens.render(ASK, [CALCULATOR])
    ids = tokens.tokenizer.encode("".join(pieces)) + (tokens.stop_token_ids[:1] if end else [])
    fmt = ReplyFormat([CALCULATOR], parse_tools, stop)
    whole = read_reply(tokens, fmt, prompt, ids, "c")
    stream = ReplyStream(tokens, fmt, prompt, EveryTime())
    deltas = []
    for at in range(chunk, len(ids), chunk):
        deltas += stream.feed(ids[:at])
    deltas += stream.finish(whole)
    assert joined(deltas) == joined(deltas_of(whole))
    assert (
        all("<tool_call>" not in d.content for d in deltas)
        or not parse_tools
        or "<tool_call>" in (whole["content"] or "")
    )


class EveryTime(Pace):
    def interval(self, cost_s: float) -> float:
        return 0.0


_CACHE: dict[bool, Tokens] = {}


def _tokens(folder: Any, thinking: bool) -> Tokens:
    if thinking not in _CACHE:
        _CACHE[thinking] = Tokens.load(folder, GatewayConfig(enable_thinking=thinking))
    return _CACHE[thinking]


def test_reasoning_is_apart_from_the_answer(model_folder: Any) -> None:
    tokens = _tokens(model_folder, True)
    prompt = tokens.render(ASK, [])
    ids = tokens.tokenizer.encode("<think>\ntwo and three\n</think>\n\nfive") + tokens.stop_token_ids[:1]
    fmt = ReplyFormat([], False, ())
    stream = ReplyStream(tokens, fmt, prompt, EveryTime())
    before = [d for at in range(1, len(ids)) for d in stream.feed(ids[:at])]
    whole = read_reply(tokens, fmt, prompt, ids, "c")
    assert whole == {"role": "assistant", "content": "five", "reasoning_content": "two and three"}
    assert joined([*before, *stream.finish(whole)]) == ("two and three", "five", [])
    assert len(before) > 3, "it was streamed, not sent at the end"


async def test_a_streamed_reply_reads_like_an_unstreamed_one(served: Served) -> None:
    text = f"Let me think about it, carefully.\n{tool_call()}\n{tool_call(arguments='{}')}"
    served.fleet.say(Reply(text, chunk=2), Reply(text, chunk=2, delay_s=0.005))
    session = await served.open()
    client = served.openai(session)
    plain = await client.chat.completions.create(model="m", messages=ASK, tools=[CALCULATOR])
    stream = await client.chat.completions.create(
        model="m", messages=ASK, tools=[CALCULATOR], stream=True, stream_options={"include_usage": True}
    )
    chunks = [c async for c in stream]
    content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    calls = [t for c in chunks if c.choices for t in c.choices[0].delta.tool_calls or []]
    message = plain.choices[0].message
    assert content == message.content
    assert [(t.index, t.function.name, t.function.arguments) for t in calls] == [
        (i, t.function.name, t.function.arguments) for i, t in enumerate(message.tool_calls)
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    assert chunks[-1].usage == plain.usage
    assert sum(1 for c in chunks if c.choices and c.choices[0].delta.content) > 3


async def test_streamed_siblings_keep_their_index(served: Served) -> None:
    served.fleet.say("alpha beta gamma", "delta epsilon")
    session = await served.open()
    stream = await served.openai(session).chat.completions.create(model="m", messages=ASK, n=2, stream=True)
    said: dict[int, str] = {0: "", 1: ""}
    ends = {}
    async for chunk in stream:
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert sorted(said.values()) == ["alpha beta gamma", "delta epsilon"]
    assert ends == {0: "stop", 1: "stop"}


async def test_streamed_logprobs_are_all_there(served: Served) -> None:
    served.fleet.say(Reply("one two three four five", chunk=2))
    session = await served.open()
    stream = await served.openai(session).chat.completions.create(
        model="m", messages=ASK, stream=True, logprobs=True
    )
    got = [
        t.logprob
        async for c in stream
        for choice in c.choices
        if choice.logprobs
        for t in choice.logprobs.content
    ]
    asked = served.fleet.asked[0]
    assert got == [logprob(asked.prompt_ids, i) for i in range(len(asked.output_ids))]


async def test_bytes_flow_while_the_engine_is_silent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "KEEP_ALIVE_S", 0.05)
    gate = asyncio.Event()
    served.fleet.say(Reply("five", gate=gate))
    session = await served.open()
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    body = {"messages": ASK, "stream": True}
    async with served.http.post(served.url + "/v1/chat/completions", json=body, headers=headers) as r:
        assert (await r.content.readline()) == b": keep-alive\n"
        gate.set()
        rest = await r.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_an_error_before_the_first_byte_is_a_status(served: Served) -> None:
    served.fleet.say(Reply("", finish=None, error=EngineError("the engine caught fire")))
    session = await served.open()
    with pytest.raises(openai.InternalServerError) as e:
        await served.openai(session, max_retries=0).chat.completions.create(
            model="m", messages=ASK, stream=True
        )
    assert e.value.status_code == 503
    assert "caught fire" in e.value.message


async def test_an_error_in_the_middle_is_an_event_and_no_end(served: Served) -> None:
    served.fleet.say(Reply("one two three four", chunk=2, error=EngineError("the engine caught fire")))
    session = await served.open()
    status, _, raw = await served.post(session, {"messages": ASK, "stream": True})
    assert status == 200
    events = [json.loads(line[6:]) for line in raw.decode().split("\n\n") if line.startswith("data: {")]
    assert "caught fire" in events[-1]["error"]["message"]
    assert b"[DONE]" not in raw
    (call,) = (await served.inspect(session))["calls"]
    assert (call["state"], call["delivered"]) == ("failed", False)
    assert "caught fire" in call["incomplete_reason"]


async def test_a_stream_cut_by_the_engine_is_no_reply(served: Served) -> None:
    served.fleet.say(Reply("one two", finish=None))
    session = await served.open()
    status, _, body = await served.post(session, {"messages": ASK})
    assert status == 503
    assert "without an end" in body["error"]["message"]
    (call,) = (await served.inspect(session))["calls"]
    assert call["state"] == "failed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_the_engines_work(served: Served, stream: bool) -> None:
    served.fleet.say(Reply("one two three", gate=asyncio.Event()))
    session = await served.open()
    task = asyncio.create_task(served.post(session, {"messages": ASK, "stream": stream}))
    await eventually(lambda: served.fleet.asked)
    task.cancel()
    await eventually(lambda: served.fleet.asked[0].ended == "cancelled")
    await eventually(lambda: served.gateway.calls.totals["aborted"] == 1)
    (call,) = (await served.inspect(session))["calls"]
    assert (call["state"], call["delivered"], call["incomplete_reason"]) == (
        "aborted",
        False,
        "the client left",
    )


async def test_one_failing_sibling_fails_the_request_and_frees_the_others(served: Served) -> None:
    served.fleet.say(
        Reply("x", finish=None, error=EngineError("out of luck")), Reply("y", gate=asyncio.Event())
    )
    session = await served.open()
    status, _, _ = await served.post(session, {"messages": ASK, "n": 2})
    assert status == 503
    assert served.fleet.asked[1].ended == "cancelled"
    states = sorted(c["state"] for c in (await served.inspect(session))["calls"])
    assert states == ["aborted", "failed"]
