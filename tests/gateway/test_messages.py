"""Anthropic's Messages API as its SDK sees it, and what is recorded of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest
from gateway_support import CONTEXT, Reply, Served, tool_call

from areal_agent.errors import EngineError
from areal_gateway import agent

ASK: Any = [{"role": "user", "content": "What is two plus three?"}]
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
CALCULATOR: Any = {"name": "calculator", "description": "Evaluates an expression.", "input_schema": SCHEMA}
SLOPPY = '{"expression":   "2+3", "exact": false,"n":1.0}'
THOUGHT = "<think>\ntwo and three\n</think>\n\n"


def asking(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 100, "messages": ASK, **fields}


async def message_of(client: Any, stream: bool, **fields: Any) -> Any:
    """The SDK's message, asked for whole or accumulated by the SDK from its stream."""
    if not stream:
        return await client.messages.create(**asking(**fields))
    async with client.messages.stream(**asking(**fields)) as events:
        return await events.get_final_message()


def result_of(message: Any, content: Any = "5") -> dict[str, Any]:
    uses = [b for b in message.content if b.type == "tool_use"]
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": u.id, "content": content} for u in uses],
    }


async def post(served: Served, session: Any, body: Any, path: str = "/v1/messages") -> Any:
    return await served.post(session, body, path=path)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_plain_reply(served: Served, stream: bool) -> None:
    served.fleet.say("five")
    session = await served.open()
    message = await message_of(served.anthropic(session), stream, model="any")
    assert [(b.type, b.text) for b in message.content] == [("text", "five")]
    assert (message.role, message.stop_reason, message.model) == ("assistant", "end_turn", "any")
    assert message.usage.input_tokens == len(served.fleet.asked[0].prompt_ids)
    assert message.usage.output_tokens == len(served.fleet.asked[0].output_ids)
    (call,) = (await served.inspect(session))["calls"]
    assert (call["state"], call["delivered"]) == ("complete", True)


async def test_the_prompt_is_the_renderers(served: Served) -> None:
    session = await served.open()
    await served.anthropic(session).messages.create(**asking(system="Be brief.", tools=[CALCULATOR]))
    function = {"name": "calculator", "description": "Evaluates an expression.", "parameters": SCHEMA}
    expected = served.gateway.tokens.renderer.render_ids(
        [{"role": "system", "content": "Be brief."}, *ASK],
        tools=[{"type": "function", "function": function}],
        add_generation_prompt=True,
    )
    assert served.fleet.asked[0].prompt_ids == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_use_has_anthropics_shape(served: Served, stream: bool) -> None:
    served.fleet.say(f"Let me see.\n{tool_call()}\n{tool_call(arguments='{}')}")
    session = await served.open()
    message = await message_of(served.anthropic(session), stream, tools=[CALCULATOR])
    text, first, second = message.content
    assert text.text == "Let me see."
    assert (first.name, first.input) == ("calculator", {"expression": "2+3"})
    assert (second.name, second.input) == ("calculator", {})
    assert first.id != second.id
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sdks_own_echo_continues_the_stored_ids(served: Served, stream: bool) -> None:
    served.fleet.say(
        f"Let me see.\n{tool_call(arguments=SLOPPY)}\n{tool_call()}",
        tool_call(arguments='{"expression": "5"}'),
        "It is 5.",
    )
    session = await served.open()
    client = served.anthropic(session)
    messages = list(ASK)
    for _ in range(2):
        message = await message_of(client, stream, messages=messages, tools=[CALCULATOR], system="Be brief.")
        messages += [{"role": "assistant", "content": message.content}, result_of(message)]
    last = await message_of(client, stream, messages=messages, tools=[CALCULATOR], system="Be brief.")
    assert last.content[0].text == "It is 5."
    text = served.gateway.tokens.text(await served.one_branch(session))
    assert SLOPPY in text, "the arguments stay as they were sampled"
    assert text.count("<tool_response>\n5\n</tool_response>") == 3


@pytest.mark.parametrize("odd", ["[1,  2.0]", '"a text"', "null", '{"n": 123456789012345678901234567890}'])
async def test_arguments_that_are_no_object_come_back_as_they_went(served: Served, odd: str) -> None:
    served.fleet.say(tool_call(arguments=odd))
    session = await served.open()
    _, _, message = await post(served, session, asking(tools=[CALCULATOR]))
    (use,) = message["content"]
    later = [{"type": "tool_result", "tool_use_id": use["id"], "content": "?"}]
    messages = [*ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": later}]
    await post(served, session, asking(messages=messages, tools=[CALCULATOR]))
    await served.one_branch(session)


async def test_a_dumped_echo_continues_too(served: Served) -> None:
    served.fleet.say(f"Let me see.\n{tool_call(arguments=SLOPPY)}")
    session = await served.open()
    client = served.anthropic(session)
    message = await client.messages.create(**asking(tools=[CALCULATOR]))
    echo = [json.loads(json.dumps(b.model_dump(), sort_keys=True)) for b in message.content]
    echo[-1]["cache_control"] = {"type": "ephemeral"}
    result = [{"type": "text", "text": "5"}]
    messages = [*ASK, {"role": "assistant", "content": echo}, result_of(message, result)]
    await client.messages.create(**asking(messages=messages, tools=[CALCULATOR]))
    await served.one_branch(session)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wish", [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, None])
async def test_thinking_is_recorded_and_shown_to_those_who_ask(
    thinking: Served, stream: bool, wish: Any
) -> None:
    thinking.fleet.say(f"{THOUGHT}Let me see.\n{tool_call()}", "It is five.")
    session = await thinking.open()
    client = thinking.anthropic(session)
    fields: Any = {"max_tokens": 2000, "tools": [CALCULATOR], **({"thinking": wish} if wish else {})}
    message = await message_of(client, stream, **fields)
    if wish and wish["type"] == "enabled":
        thought = message.content[0]
        assert (thought.type, thought.thinking) == ("thinking", "two and three")
        assert thought.signature
    assert [b.type for b in message.content][-2:] == ["text", "tool_use"]
    assert len(message.content) == (3 if wish and wish["type"] == "enabled" else 2)
    messages = [*ASK, {"role": "assistant", "content": message.content}, result_of(message)]
    await message_of(client, stream, messages=messages, **fields)
    assert "two and three" in thinking.gateway.tokens.text(await thinking.one_branch(session))


@pytest.mark.parametrize("stream", [False, True])
async def test_an_empty_reply_is_an_empty_text(served: Served, stream: bool) -> None:
    served.fleet.say("", "Yes.")
    session = await served.open()
    client = served.anthropic(session)
    message = await message_of(client, stream)
    assert [(b.type, b.text) for b in message.content] == [("text", "")]
    messages = [*ASK, {"role": "assistant", "content": []}, {"role": "user", "content": "Well?"}]
    await message_of(client, stream, messages=messages)
    await served.one_branch(session)


async def test_results_and_text_keep_their_order(served: Served) -> None:
    served.fleet.say(tool_call() + tool_call())
    session = await served.open()
    client = served.anthropic(session)
    message = await client.messages.create(**asking(tools=[CALCULATOR]))
    later = result_of(message)
    later["content"].append({"type": "text", "text": "Now hurry."})
    messages = [*ASK, {"role": "assistant", "content": message.content}, later]
    await client.messages.create(**asking(messages=messages, tools=[CALCULATOR]))
    text = served.gateway.tokens.text(await served.one_branch(session))
    assert text.count("<tool_response>") == 2
    assert text.rindex("</tool_response>") < text.index("Now hurry.")


class TestSystem:
    """The system prompt is one text, however it is cut."""

    async def prompt(self, served: Served, system: Any) -> list[int]:
        session = await served.open()
        status, _, body = await post(served, session, asking(system=system))
        assert status == 200, body
        return served.fleet.asked[-1].prompt_ids

    async def test_blocks_are_their_text(self, served: Served) -> None:
        blocks = [
            {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief."},
        ]
        assert await self.prompt(served, blocks) == await self.prompt(served, "Be brief.")

    async def test_a_billing_line_is_no_prompt(self, served: Served) -> None:
        billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=7f3a"}
        blocks = [billing, {"type": "text", "text": "Be brief."}]
        assert await self.prompt(served, blocks) == await self.prompt(served, "Be brief.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "fields", "reason", "sequence"),
    [
        ("one two three four", {"max_tokens": 3}, "max_tokens", None),
        (Reply("one STOP", finish=None), {"stop_sequences": ["END", "STOP"]}, "stop_sequence", "STOP"),
        ("one", {"stop_sequences": ["STOP"]}, "end_turn", None),
    ],
)
async def test_why_a_reply_ended(
    served: Served, stream: bool, said: Any, fields: Any, reason: str, sequence: str | None
) -> None:
    if isinstance(said, Reply):  # the engine ends at the string, without an end-of-turn token
        said = Reply(ids=served.fleet.encode(said.text))
    served.fleet.say(said)
    session = await served.open()
    message = await message_of(served.anthropic(session), stream, **fields)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert "STOP" not in message.content[0].text


async def test_a_streams_events_come_in_anthropics_order(thinking: Served) -> None:
    thinking.fleet.say(Reply(f"{THOUGHT}Let me see.\n{tool_call()}", chunk=2, delay_s=0.005))
    session = await thinking.open()
    body = asking(stream=True, tools=[CALCULATOR], thinking={"type": "adaptive"})
    _, headers, raw = await post(thinking, session, body)
    assert headers["content-type"].startswith("text/event-stream")
    events = []
    for part in raw.decode().strip().split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    order = [e["type"] for e in events]
    assert order[0] == "message_start"
    assert order[-2:] == ["message_delta", "message_stop"]
    starts = [(e["index"], e["content_block"]["type"]) for e in events if e["type"] == "content_block_start"]
    assert starts == [(0, "thinking"), (1, "text"), (2, "tool_use")]
    open_block = None
    for e in events:
        match e["type"]:
            case "content_block_start":
                assert open_block is None
                open_block = e["index"]
            case "content_block_delta":
                assert e["index"] == open_block
            case "content_block_stop":
                assert e["index"] == open_block
                open_block = None
    texts = [e for e in events if e.get("delta", {}).get("type") == "text_delta"]
    assert len(texts) > 1, "it was streamed, not sent at the end"
    assert events[-2]["usage"]["output_tokens"] == len(thinking.fleet.asked[0].output_ids)


async def test_pings_while_the_engine_is_silent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "KEEP_ALIVE_S", 0.05)
    gate = asyncio.Event()
    served.fleet.say(Reply("five", gate=gate))
    session = await served.open()
    headers = {"x-api-key": session["api_key"]}
    async with served.http.post(served.url + "/v1/messages", json=asking(stream=True), headers=headers) as r:
        seen = b""
        while b"event: ping" not in seen:
            seen += await r.content.readline()
        gate.set()
        rest = await r.content.read()
    assert seen.startswith(b"event: message_start\n")
    assert rest.count(b"event: message_start") == 0
    assert b"event: message_stop" in rest


async def test_the_sdk_sleeps_through_pings(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "KEEP_ALIVE_S", 0.02)
    served.fleet.say(Reply("five", delay_s=0.1))
    session = await served.open()
    message = await message_of(served.anthropic(session), True)
    assert message.content[0].text == "five"


class TestCountTokens:
    """The very number of tokens that asking would take, and nothing is asked."""

    async def test_of_a_fresh_conversation(self, served: Served) -> None:
        session = await served.open()
        client = served.anthropic(session)
        fields: Any = {"model": "m", "messages": ASK, "system": "Be brief.", "tools": [CALCULATOR]}
        counted = await client.messages.count_tokens(**fields)
        assert served.fleet.asked == []
        message = await client.messages.create(max_tokens=9, **fields)
        assert counted.input_tokens == message.usage.input_tokens

    async def test_of_a_continued_one(self, served: Served) -> None:
        served.fleet.say(tool_call(arguments=SLOPPY))
        session = await served.open()
        client = served.anthropic(session)
        message = await client.messages.create(**asking(tools=[CALCULATOR]))
        messages = [*ASK, {"role": "assistant", "content": message.content}, result_of(message)]
        counted = await client.messages.count_tokens(model="m", messages=messages, tools=[CALCULATOR])
        second = await client.messages.create(**asking(messages=messages, tools=[CALCULATOR]))
        assert counted.input_tokens == second.usage.input_tokens
        await served.one_branch(session)

    async def test_of_more_than_the_context(self, served: Served) -> None:
        session = await served.open()
        long = [{"role": "user", "content": "x" * 3 * CONTEXT}]
        counted = await served.anthropic(session).messages.count_tokens(model="m", messages=long)
        assert counted.input_tokens > CONTEXT


class TestErrors:
    """In Anthropic's shape: the SDK raises the class that its user expects."""

    async def test_a_full_context(self, served: Served) -> None:
        session = await served.open()
        long = [{"role": "user", "content": "x" * 3 * CONTEXT}]
        with pytest.raises(
            anthropic.BadRequestError, match=rf"prompt is too long: \d+ tokens > {CONTEXT - 1}"
        ) as e:
            await served.anthropic(session).messages.create(**asking(messages=long))
        assert e.value.body["error"]["type"] == "invalid_request_error"
        assert served.fleet.asked == []

    async def test_a_wrong_key(self, served: Served) -> None:
        with pytest.raises(anthropic.AuthenticationError) as e:
            await served.anthropic({"api_key": "sk-areal-nobody"}).messages.create(**asking())
        assert e.value.body["type"] == "error"

    async def test_an_engine_that_fails_before_the_first_byte(self, served: Served) -> None:
        served.fleet.say(Reply("", finish=None, error=EngineError("the engine caught fire")))
        session = await served.open()
        with pytest.raises(anthropic.APIStatusError, match="caught fire") as e:
            await message_of(served.anthropic(session, max_retries=0), True)
        assert e.value.status_code == 503
        assert e.value.body["error"]["type"] == "overloaded_error"

    async def test_an_engine_that_fails_in_the_middle(self, served: Served) -> None:
        served.fleet.say(Reply("one two three four", chunk=2, error=EngineError("the engine caught fire")))
        session = await served.open()
        with pytest.raises(anthropic.APIStatusError, match="caught fire"):
            await message_of(served.anthropic(session), True)
        (call,) = (await served.inspect(session))["calls"]
        assert (call["state"], call["delivered"]) == ("failed", False)

    @pytest.mark.parametrize(
        ("body", "says"),
        [
            ({"messages": ASK}, "max_tokens: Field required"),
            (asking(max_tokens=0), "max_tokens"),
            (asking(max_tokens="many"), "max_tokens"),
            (asking(messages=[]), "messages"),
            (asking(messages="hi"), "messages"),
            (asking(messages=[{"role": "wizard", "content": "x"}]), "wizard"),
            (asking(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]), "text only"),
            (asking(messages=[{"role": "user", "content": [{"type": "text"}]}]), "content[0]"),
            (asking(messages=[{"role": "user", "content": 5}]), "content"),
            (asking(messages=[*ASK, {"role": "assistant", "content": "It is"}]), "must end with a user"),
            (asking(messages=[{"role": "assistant", "content": [{"type": "tool_use"}]}, *ASK]), "name"),
            (asking(tools=[{"type": "web_search_20250305", "name": "web_search"}]), "tools[0]"),
            (asking(tools=[{"name": "f", "input_schema": "x"}]), "tools[0]"),
            (asking(tools=["f"]), "tools[0]"),
            (asking(system=[{"type": "image"}]), "system[0]"),
            (asking(stop_sequences="x" * 3, stream="yes"), "stream"),
            (asking(container="c"), "container"),
            (asking(mcp_servers=[{"url": "http://x"}]), "mcp_servers"),
            ([], "object"),
        ],
    )
    async def test_bad_requests_get_a_sentence(self, served: Served, body: Any, says: str) -> None:
        session = await served.open()
        status, _, answer = await post(served, session, body)
        assert status == 400
        assert answer["type"] == "error"
        assert answer["error"]["type"] == "invalid_request_error"
        assert says in answer["error"]["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": 0.3, "top_p": 0.9, "top_k": 5},
        {"tool_choice": {"type": "any"}, "tools": [CALCULATOR]},
        {"tool_choice": {"type": "tool", "name": "calculator"}, "tools": [{**CALCULATOR, "type": "custom"}]},
        {"thinking": {"type": "disabled"}},
        {"metadata": {"user_id": "me"}},
        {"service_tier": "auto"},
        {"system": None, "tools": None, "stop_sequences": None},
        {"output_config": {"effort": "low"}},
        {"never_heard_of": {"deep": [1, 2]}},
    ],
)
async def test_fields_of_todays_sdks_are_never_an_error(served: Served, extra: Any) -> None:
    session = await served.open()
    status, _, body = await post(served, session, asking(**extra))
    assert status == 200, body


async def test_sampling_is_pinned_and_told(served: Served) -> None:
    session = await served.open(sampling={"temperature": 0.5})
    _, headers, _ = await post(served, session, asking(temperature=0.0, tool_choice={"type": "auto"}))
    assert served.fleet.asked[0].sampling.temperature == 0.5
    assert headers["x-areal-ignored"] == "temperature"


async def test_a_told_none_leaves_markup_as_text(served: Served) -> None:
    served.fleet.say(tool_call())
    session = await served.open()
    message = await served.anthropic(session).messages.create(
        **asking(tools=[CALCULATOR], tool_choice={"type": "none"})
    )
    assert [b.type for b in message.content] == ["text"]
    assert message.content[0].text == tool_call()


async def test_a_reward_finds_its_message(served: Served) -> None:
    session = await served.open()
    message = await served.anthropic(session).messages.create(**asking())
    status, _, _ = await served.post(session, {"response_id": message.id, "value": 1.0}, path="/v1/rewards")
    assert status == 200
