"""OpenAI's Responses API as its SDK sees it, and what is recorded of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_support import CONTEXT, Reply, Served, logprob, make_app, tool_call

from areal_agent.errors import EngineError
from areal_gateway import agent
from areal_gateway.tokens import Tokens

ASK = "What is two plus three?"
USER = {"role": "user", "content": ASK}
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
CALCULATOR: Any = {
    "type": "function",
    "name": "calculator",
    "description": "Evaluates an expression.",
    "parameters": SCHEMA,
    "strict": True,
}
SLOPPY = '{"expression":   "2+3", "exact": false,"n":1.0}'
THOUGHT = "<think>\ntwo and three\n</think>\n\n"


async def response_of(client: Any, stream: bool, **fields: Any) -> Any:
    """The SDK's response, asked for whole or accumulated by the SDK from its stream."""
    fields = {"model": "m", "input": ASK, **fields}
    if not stream:
        return await client.responses.create(**fields)
    async with client.responses.stream(**fields) as events:
        async for event in events:
            last = event
    return last.response  # `get_final_response` knows no response.incomplete


def outputs_of(response: Any, output: Any = "5") -> list[dict[str, Any]]:
    calls = [item for item in response.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": c.call_id, "output": output} for c in calls]


async def post(served: Served, session: Any, body: Any, path: str = "/v1/responses") -> Any:
    return await served.post(session, body, path=path)


def events_of(raw: bytes) -> list[dict[str, Any]]:
    events = []
    for part in raw.decode().strip().split("\n\n"):
        if part.startswith(":"):
            continue
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    return events


@pytest.mark.parametrize("stream", [False, True])
async def test_a_plain_reply(served: Served, stream: bool) -> None:
    served.fleet.say("five")
    session = await served.open()
    response = await response_of(served.openai(session), stream, model="any")
    assert response.output_text == "five"
    assert [(i.type, i.status) for i in response.output] == [("message", "completed")]
    assert (response.status, response.model, response.error) == ("completed", "any", None)
    assert response.usage.input_tokens == len(served.fleet.asked[0].prompt_ids)
    assert response.usage.output_tokens == len(served.fleet.asked[0].output_ids)
    (call,) = (await served.inspect(session))["calls"]
    assert (call["state"], call["delivered"]) == ("complete", True)


async def test_the_prompt_is_the_renderers(served: Served) -> None:
    session = await served.open()
    await response_of(served.openai(session), False, instructions="Be brief.", tools=[CALCULATOR])
    function = {"name": "calculator", "description": "Evaluates an expression.", "parameters": SCHEMA}
    expected = served.gateway.tokens.renderer.render_ids(
        [{"role": "system", "content": "Be brief."}, USER],
        tools=[{"type": "function", "function": function}],
        add_generation_prompt=True,
    )
    assert served.fleet.asked[0].prompt_ids == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_a_function_call_is_an_item(served: Served, stream: bool) -> None:
    served.fleet.say(f"Let me see.\n{tool_call()}\n{tool_call(arguments='{}')}")
    session = await served.open()
    response = await response_of(served.openai(session), stream, tools=[CALCULATOR])
    message, first, second = response.output
    assert message.content[0].text == "Let me see."
    assert (first.name, json.loads(first.arguments)) == ("calculator", {"expression": "2+3"})
    assert json.loads(second.arguments) == {}
    assert first.call_id != second.call_id
    assert len({message.id, first.id, second.id}) == 3


class TestTurns:
    """However the conversation is told, the next prompt begins with the stored ids."""

    SAID = (
        f"Let me see.\n{tool_call(arguments=SLOPPY)}\n{tool_call()}",
        tool_call(arguments="{}"),
        "It is 5.",
    )

    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_sdks_own_items(self, served: Served, stream: bool) -> None:
        served.fleet.say(*self.SAID)
        session = await served.open()
        client = served.openai(session)
        fields: Any = {"tools": [CALCULATOR], "instructions": "Be brief."}
        items: list[Any] = [USER]
        for _ in range(2):
            response = await response_of(client, stream, input=items, **fields)
            items += [*response.output, *outputs_of(response)]
        last = await response_of(client, stream, input=items, **fields)
        assert last.output_text == "It is 5."
        text = served.gateway.tokens.text(await served.one_branch(session))
        assert SLOPPY in text, "the arguments stay as they were sampled"
        assert text.count("<tool_response>\n5\n</tool_response>") == 3

    @pytest.mark.parametrize("stream", [False, True])
    async def test_previous_response_id(self, served: Served, stream: bool) -> None:
        served.fleet.say(*self.SAID)
        session = await served.open()
        client = served.openai(session)
        fields: Any = {"tools": [CALCULATOR], "instructions": "Be brief."}
        response = await response_of(client, stream, **fields)
        for _ in range(2):
            response = await response_of(
                client, stream, input=outputs_of(response), previous_response_id=response.id, **fields
            )
        assert response.output_text == "It is 5."
        await served.one_branch(session)

    async def test_previous_response_id_after_a_restart(self, tokens: Tokens, tmp_path: Path) -> None:
        first = make_app(tokens, tmp_path)
        await first.start()
        first.fleet.say(tool_call(arguments=SLOPPY))
        session = await first.open()
        response = await response_of(
            first.openai(session), False, tools=[CALCULATOR], instructions="Be brief.", store=False
        )
        stored = first.fleet.asked[0].prompt_ids + first.fleet.asked[0].output_ids
        await first.stop()
        second = make_app(tokens, tmp_path)
        await second.start()
        try:
            session = {**session, "base_url": second.url + "/v1"}
            await response_of(
                second.openai(session),
                False,
                input=outputs_of(response),
                previous_response_id=response.id,
                tools=[CALCULATOR],
                instructions="Be brief.",
            )
            assert second.fleet.asked[0].prompt_ids[: len(stored)] == stored
        finally:
            await second.stop()

    async def test_items_dumped_and_without_ids(self, served: Served) -> None:
        """What stateless clients send: plain dictionaries, ids and statuses taken out, encrypted reasoning added."""
        served.fleet.say(self.SAID[0])
        session = await served.open()
        client = served.openai(session)
        response = await response_of(client, False, tools=[CALCULATOR])
        dumped = [i.model_dump(exclude={"id", "status"}) for i in response.output]
        thought = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
        items = [USER, thought, *dumped, *outputs_of(response, [{"type": "input_text", "text": "5"}])]
        status, _, body = await post(served, session, {"input": items, "tools": [CALCULATOR]})
        assert status == 200, body
        await served.one_branch(session)

    async def test_item_references(self, served: Served) -> None:
        served.fleet.say(self.SAID[0])
        session = await served.open()
        response = await response_of(served.openai(session), False, tools=[CALCULATOR])
        refs = [{"type": "item_reference", "id": i.id} for i in response.output]
        items = [USER, *refs, *outputs_of(response)]
        status, _, body = await post(served, session, {"input": items, "tools": [CALCULATOR]})
        assert status == 200, body
        await served.one_branch(session)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_reasoning_items(self, thinking: Served, stream: bool) -> None:
        thinking.fleet.say(f"{THOUGHT}Let me see.\n{tool_call()}", "It is five.")
        session = await thinking.open()
        client = thinking.openai(session)
        response = await response_of(client, stream, tools=[CALCULATOR])
        assert [i.type for i in response.output] == ["reasoning", "message", "function_call"]
        assert response.output[0].content[0].text == "two and three"
        items = [USER, *response.output, *outputs_of(response)]
        await response_of(client, stream, input=items, tools=[CALCULATOR])
        assert "two and three" in thinking.gateway.tokens.text(await thinking.one_branch(session))

    @pytest.mark.parametrize("stream", [False, True])
    async def test_an_empty_reply(self, served: Served, stream: bool) -> None:
        served.fleet.say("", "Yes.")
        session = await served.open()
        client = served.openai(session)
        response = await response_of(client, stream)
        assert response.output_text == ""
        await response_of(
            client, stream, input=[USER, *response.output, {"role": "user", "content": "Well?"}]
        )
        await served.one_branch(session)

    async def test_two_replies_that_say_the_same_are_told_apart_by_id(self, served: Served) -> None:
        served.fleet.say("five", "five")
        session = await served.open()
        client = served.openai(session)
        responses = [await response_of(client, False) for _ in range(2)]
        for response in responses:
            await response_of(client, False, input="Sure?", previous_response_id=response.id)
        calls = (await served.inspect(session))["calls"]
        assert [c["parent_id"] for c in calls[2:]] == [c["call_id"] for c in calls[:2]]

    async def test_a_chat_goes_on_as_responses(self, served: Served) -> None:
        served.fleet.say("five", "Yes.")
        session = await served.open()
        client = served.openai(session)
        reply = await client.chat.completions.create(model="m", messages=[USER])
        message = {"role": "assistant", "content": reply.choices[0].message.content}
        await response_of(client, False, input=[USER, message, {"role": "user", "content": "Sure?"}])
        await served.one_branch(session)


class TestInstructions:
    """They are of one response; system messages of the input are of the conversation."""

    async def prompt(self, served: Served, first: dict[str, Any], second: dict[str, Any]) -> str:
        session = await served.open()
        client = served.openai(session)
        response = await response_of(client, False, **first)
        await response_of(client, False, input="Sure?", previous_response_id=response.id, **second)
        return served.gateway.tokens.text(served.fleet.asked[-1].prompt_ids)

    async def test_they_are_not_carried_over(self, served: Served) -> None:
        text = await self.prompt(served, {"instructions": "Be brief."}, {})
        assert "Be brief." not in text
        assert ASK in text

    async def test_new_ones_take_their_place(self, served: Served) -> None:
        text = await self.prompt(served, {"instructions": "Be brief."}, {"instructions": "Be long."})
        assert "Be brief." not in text
        assert "<|im_start|>system\nBe long." in text

    @pytest.mark.parametrize("role", ["system", "developer"])
    async def test_system_messages_are_carried_over(self, served: Served, role: str) -> None:
        text = await self.prompt(served, {"input": [{"role": role, "content": "Be brief."}, USER]}, {})
        assert "<|im_start|>system\nBe brief." in text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_reply_is_incomplete(served: Served, stream: bool) -> None:
    served.fleet.say("one two three four five")
    session = await served.open()
    response = await response_of(served.openai(session), stream, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"
    assert response.usage.output_tokens == 3


async def test_a_response_repeats_its_request(served: Served) -> None:
    session = await served.open(sampling={"temperature": 0.5})
    response = await response_of(
        served.openai(session),
        False,
        instructions="Be brief.",
        tools=[CALCULATOR],
        metadata={"a": "b"},
        temperature=1.5,
        max_output_tokens=50,
    )
    assert response.instructions == "Be brief."
    assert response.tools[0].name == "calculator"
    assert response.metadata == {"a": "b"}
    assert response.max_output_tokens == 50
    assert response.temperature == 0.5, "that which was sampled with"


async def test_logprobs_when_they_are_included(served: Served) -> None:
    served.fleet.say("five")
    session = await served.open()
    include: Any = ["message.output_text.logprobs"]
    response = await response_of(served.openai(session), False, include=include)
    asked = served.fleet.asked[0]
    got = [t.logprob for t in response.output[0].content[0].logprobs]
    assert got == [logprob(asked.prompt_ids, i) for i in range(len(asked.output_ids))]


async def test_streamed_logprobs_are_all_there(served: Served) -> None:
    served.fleet.say(Reply("one two three four five", chunk=2))
    session = await served.open()
    body = {"input": ASK, "stream": True, "include": ["message.output_text.logprobs"]}
    _, _, raw = await post(served, session, body)
    events = events_of(raw)
    asked = served.fleet.asked[0]
    expected = [logprob(asked.prompt_ids, i) for i in range(len(asked.output_ids))]
    (done,) = [e for e in events if e["type"] == "response.output_text.done"]
    assert [t["logprob"] for t in done["logprobs"]] == expected
    deltas = [t["logprob"] for e in events if e["type"].endswith("text.delta") for t in e["logprobs"]]
    assert deltas == expected[: len(deltas)]


async def test_a_streams_events_come_in_openais_order(thinking: Served) -> None:
    thinking.fleet.say(Reply(f"{THOUGHT}Let me see.\n{tool_call()}", chunk=2, delay_s=0.005))
    session = await thinking.open()
    _, headers, raw = await post(thinking, session, {"input": ASK, "stream": True, "tools": [CALCULATOR]})
    assert headers["content-type"].startswith("text/event-stream")
    events = events_of(raw)
    names: list[str] = []
    for e in events:
        if not names or names[-1] != e["type"]:  # a run of deltas once
            names.append(e["type"])
    part = ["response.content_part.added", "{}.delta", "{}.done", "response.content_part.done"]
    added, done = "response.output_item.added", "response.output_item.done"
    call = "response.function_call_arguments"
    assert names == [
        "response.created",
        "response.in_progress",
        added,
        *(p.format("response.reasoning_text") for p in part),
        done,
        added,
        *(p.format("response.output_text") for p in part),
        done,
        added,
        f"{call}.delta",
        f"{call}.done",
        done,
        "response.completed",
    ]
    assert sum(e["type"] == "response.output_text.delta" for e in events) > 1, "not sent at the end"
    whole = events[-1]["response"]
    assert [e["item"] for e in events if e["type"] == done] == whole["output"]
    assert [e["item"]["id"] for e in events if e["type"] == added] == [i["id"] for i in whole["output"]]
    assert {e["response"]["id"] for e in events if "response" in e} == {whole["id"]}


async def test_a_stream_of_nothing_still_has_its_item(served: Served) -> None:
    served.fleet.say("")
    session = await served.open()
    _, _, raw = await post(served, session, {"input": ASK, "stream": True})
    events = events_of(raw)
    items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert items == events[-1]["response"]["output"]
    assert items[0]["content"][0]["text"] == ""


async def test_a_replayed_stream_has_the_same_items(served: Served) -> None:
    served.fleet.say(f"Let me see.\n{tool_call()}")
    session = await served.open()
    body = {"input": ASK, "stream": True, "tools": [CALCULATOR]}
    said = []
    for retry in ("0", "1"):
        headers = {"x-stainless-retry-count": retry}
        _, _, raw = await served.post(session, body, headers, "/v1/responses")
        said.append(events_of(raw)[-1]["response"])
    assert said[0] == said[1]
    assert len(served.fleet.asked) == 1


async def test_bytes_flow_while_the_engine_is_silent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "KEEP_ALIVE_S", 0.05)
    gate = asyncio.Event()
    served.fleet.say(Reply("five", gate=gate))
    session = await served.open()
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    body = {"input": ASK, "stream": True}
    async with served.http.post(served.url + "/v1/responses", json=body, headers=headers) as r:
        assert (await r.content.readline()) == b": keep-alive\n"
        gate.set()
        rest = await r.content.read()
    assert events_of(rest.strip())[-1]["type"] == "response.completed"


async def test_the_sdk_sleeps_through_keep_alives(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "KEEP_ALIVE_S", 0.02)
    served.fleet.say(Reply("five", delay_s=0.1))
    session = await served.open()
    assert (await response_of(served.openai(session), True)).output_text == "five"


class TestInputTokens:
    """The very number of tokens that asking would take, and nothing is asked."""

    async def test_of_a_continued_conversation(self, served: Served) -> None:
        served.fleet.say(tool_call(arguments=SLOPPY))
        session = await served.open()
        client = served.openai(session)
        first = await response_of(client, False, tools=[CALCULATOR])
        fields: Any = {"input": outputs_of(first), "previous_response_id": first.id, "tools": [CALCULATOR]}
        counted = await client.responses.input_tokens.count(model="m", **fields)
        assert len(served.fleet.asked) == 1
        second = await response_of(client, False, **fields)
        assert counted.input_tokens == second.usage.input_tokens
        await served.one_branch(session)


class TestErrors:
    async def test_a_full_context(self, served: Served) -> None:
        session = await served.open()
        with pytest.raises(openai.BadRequestError) as e:
            await response_of(served.openai(session), False, input="x" * 3 * CONTEXT)
        assert (e.value.code, e.value.param) == ("context_length_exceeded", "input")
        assert served.fleet.asked == []

    async def test_an_engine_that_fails_before_the_first_byte(self, served: Served) -> None:
        served.fleet.say(Reply("", finish=None, error=EngineError("the engine caught fire")))
        session = await served.open()
        with pytest.raises(openai.InternalServerError, match="caught fire") as e:
            await response_of(served.openai(session, max_retries=0), True)
        assert e.value.status_code == 503

    async def test_an_engine_that_fails_in_the_middle(self, served: Served) -> None:
        served.fleet.say(Reply("one two three four", chunk=2, error=EngineError("the engine caught fire")))
        session = await served.open()
        seen: list[Any] = []

        async def read() -> None:
            stream = await served.openai(session).responses.create(model="m", input=ASK, stream=True)
            async for event in stream:
                seen.append(event)

        with pytest.raises(openai.APIError, match="caught fire"):
            await read()
        assert seen[-1].type == "response.failed"
        assert seen[-1].response.status == "failed"
        assert "caught fire" in seen[-1].response.error.message
        (call,) = (await served.inspect(session))["calls"]
        assert (call["state"], call["delivered"]) == ("failed", False)

    async def test_another_sessions_response_is_not_found(self, served: Served) -> None:
        mine, other = await served.open(), await served.open()
        theirs = await response_of(served.openai(other), False)
        with pytest.raises(openai.BadRequestError) as e:
            await response_of(served.openai(mine), False, previous_response_id=theirs.id)
        assert e.value.code == "previous_response_not_found"

    @pytest.mark.parametrize(
        ("body", "says"),
        [
            ({}, "input"),
            ({"input": []}, "input"),
            ({"input": 5}, "input"),
            ({"input": ["x"]}, "input[0]"),
            ({"input": [{"role": "wizard", "content": "x"}]}, "wizard"),
            (
                {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
                "text only",
            ),
            ({"input": [{"role": "user", "content": ["x"]}]}, "content[0]"),
            ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "web_search_call"),
            ({"input": [{"type": "function_call", "arguments": "{}"}]}, "name"),
            ({"input": [{"type": "function_call_output", "output": 5}]}, "output"),
            ({"input": [{"type": "reasoning", "summary": "x"}]}, "summary"),
            ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "msg_1"),
            ({"input": [{"type": "item_reference"}]}, "refers"),
            ({"input": ASK, "instructions": ["x"]}, "instructions"),
            ({"input": ASK, "previous_response_id": "resp_1"}, "not found"),
            ({"input": ASK, "previous_response_id": 5}, "not found"),
            ({"input": ASK, "tools": [{"type": "web_search"}]}, "tools[0]"),
            ({"input": ASK, "tools": ["f"]}, "tools[0]"),
            ({"input": ASK, "tools": [{"type": "function"}]}, "tools[0]"),
            ({"input": ASK, "max_output_tokens": 0}, "max_output_tokens"),
            ({"input": ASK, "include": "x"}, "include"),
            ({"input": ASK, "background": True}, "background"),
            ({"input": ASK, "conversation": "c"}, "conversation"),
            ({"input": ASK, "prompt": {"id": "p"}}, "prompt"),
            ([], "object"),
        ],
    )
    async def test_bad_requests_get_a_sentence(self, served: Served, body: Any, says: str) -> None:
        session = await served.open()
        status, _, answer = await post(served, session, body)
        assert status == 400
        assert says in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": 0.3, "top_p": 0.9, "top_logprobs": 3},
        {"tool_choice": "required", "tools": [CALCULATOR], "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "name": "calculator"}, "tools": [CALCULATOR]},
        {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"]},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}, "verbosity": "low"}},
        {"truncation": "auto", "store": False, "user": "me", "service_tier": "flex", "background": False},
        {"metadata": None, "tools": None, "instructions": None, "previous_response_id": None},
        {"never_heard_of": {"deep": [1, 2]}},
    ],
)
async def test_fields_of_todays_sdks_are_never_an_error(served: Served, extra: Any) -> None:
    session = await served.open()
    status, _, body = await post(served, session, {"input": ASK, **extra})
    assert status == 200, body


async def test_a_reward_finds_its_response(served: Served) -> None:
    session = await served.open()
    response = await response_of(served.openai(session), False)
    status, _, _ = await served.post(session, {"response_id": response.id, "value": 1.0}, path="/v1/rewards")
    assert status == 200
