"""Multi-turn: a turn continues the stored ids exactly, however the agent's framework rewrites messages."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from gateway_support import CALCULATOR, Reply, Served, tool_call
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

USER = {"role": "user", "content": "What is two plus three?"}
SLOPPY = '{"expression":   "2+3", "exact": false,"n":1.0}'
"""Arguments as no serialiser would write them: every rewriting changes the text."""


async def first_turn(served: Served, text: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    served.fleet.say(text or "Let me see.\n" + tool_call(arguments=SLOPPY))
    session = await served.open()
    _, _, body = await served.post(session, {"messages": [USER], "tools": [CALCULATOR]})
    return session, body["choices"][0]["message"]


def stored(served: Served, i: int = 0) -> list[int]:
    asked = served.fleet.asked[i]
    return asked.prompt_ids + asked.output_ids


def openai_dump(m: dict[str, Any]) -> dict[str, Any]:
    """`message.model_dump()` of the openai SDK: every field, null where absent."""
    return {"annotations": None, "audio": None, "function_call": None, "refusal": None, **m}


def only_tool_calls(m: dict[str, Any]) -> dict[str, Any]:
    """What many hand-written agents echo."""
    return {"role": "assistant", "content": m["content"], "tool_calls": m["tool_calls"]}


def without_types(m: dict[str, Any]) -> dict[str, Any]:
    m = copy.deepcopy(m)
    for call in m["tool_calls"]:
        del call["type"]
    return m


def arguments_dumped_again(m: dict[str, Any]) -> dict[str, Any]:
    m = copy.deepcopy(m)
    for call in m["tool_calls"]:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True)
    return m


def through_javascript(m: dict[str, Any]) -> dict[str, Any]:
    """JSON.stringify writes 1.0 as 1, and no white space."""
    m = copy.deepcopy(m)
    for call in m["tool_calls"]:
        call["function"]["arguments"] = '{"expression":"2+3","exact":false,"n":1}'
    return m


def new_ids(m: dict[str, Any]) -> dict[str, Any]:
    m = copy.deepcopy(m)
    for i, call in enumerate(m["tool_calls"]):
        call["id"] = f"toolu_{i}"
    return m


def content_parts(m: dict[str, Any]) -> dict[str, Any]:
    return {**m, "content": [{"type": "text", "text": "Let me "}, {"type": "text", "text": "see."}]}


def extra_keys(m: dict[str, Any]) -> dict[str, Any]:
    return {**m, "id": "x", "usage": {"x": 1}, "response_metadata": {}, "name": "agent", "index": 0}


SHAPES: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
    lambda m: m,
    openai_dump,
    only_tool_calls,
    without_types,
    arguments_dumped_again,
    through_javascript,
    new_ids,
    content_parts,
    extra_keys,
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda f: f.__name__)
async def test_the_next_turn_begins_with_the_stored_ids(served: Served, shape: Any) -> None:
    session, message = await first_turn(served)
    echoed = shape(message)
    result = {"role": "tool", "tool_call_id": echoed["tool_calls"][0]["id"], "content": "5"}
    await served.post(session, {"messages": [USER, echoed, result], "tools": [CALCULATOR]})
    second = served.fleet.asked[1].prompt_ids
    assert second[: len(stored(served))] == stored(served)
    text = served.gateway.tokens.text(second[len(stored(served)) :])
    assert text == (
        "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    calls = (await served.inspect(session))["calls"]
    assert calls[1]["parent_id"] == calls[0]["call_id"]
    assert calls[1]["branch_cause"] is None


@pytest.mark.parametrize("content", [None, "", [], "absent"])
async def test_no_content_is_no_content_however_it_is_written(served: Served, content: Any) -> None:
    session, message = await first_turn(served, tool_call(arguments=SLOPPY))
    assert message["content"] is None
    echoed = {"role": "assistant", "tool_calls": message["tool_calls"]}
    if content != "absent":
        echoed["content"] = content
    await served.post(
        session, {"messages": [USER, echoed, {"role": "tool", "content": "5"}], "tools": [CALCULATOR]}
    )
    assert served.fleet.asked[1].prompt_ids[: len(stored(served))] == stored(served)


async def test_the_openai_sdks_own_echo(served: Served) -> None:
    served.fleet.say(tool_call(arguments=SLOPPY), "It is five.")
    session = await served.open()
    client = served.openai(session)
    messages: list[Any] = [USER]
    reply = await client.chat.completions.create(model="m", messages=messages, tools=[CALCULATOR])
    message = reply.choices[0].message
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}]
    await client.chat.completions.create(model="m", messages=messages, tools=[CALCULATOR])
    assert served.fleet.asked[1].prompt_ids[: len(stored(served))] == stored(served)


async def test_langchains_own_echo(served: Served) -> None:
    served.fleet.say("Hm.\n" + tool_call(arguments=SLOPPY), "It is five.", "Thank you.")
    session = await served.open()
    llm = ChatOpenAI(model="m", base_url=session["base_url"], api_key=session["api_key"]).bind_tools(
        [CALCULATOR]
    )
    messages: list[Any] = [HumanMessage("What is two plus three?")]
    reply = await llm.ainvoke(messages)
    assert isinstance(reply, AIMessage)
    messages += [reply, ToolMessage("5", tool_call_id=reply.tool_calls[0]["id"], name="calculator")]
    messages.append(await llm.ainvoke(messages))
    await llm.ainvoke([*messages, HumanMessage("Thanks")])
    for i in (0, 1):
        assert served.fleet.asked[i + 1].prompt_ids[: len(stored(served, i))] == stored(served, i)


async def test_a_truncated_reply_is_continued_as_it_was_sampled(served: Served) -> None:
    served.fleet.say(Reply("one two three four five six"))
    session = await served.open()
    _, _, body = await served.post(session, {"messages": [USER], "max_tokens": 4})
    message = body["choices"][0]["message"]
    await served.post(session, {"messages": [USER, message, {"role": "user", "content": "go on"}]})
    second = served.fleet.asked[1].prompt_ids
    assert second[: len(stored(served))] == stored(served)
    assert second[len(stored(served))] == served.gateway.tokens.stop_token_ids[0]


async def test_siblings_that_say_different_things_are_told_apart(served: Served) -> None:
    served.fleet.say("alpha", "beta")
    session = await served.open()
    _, _, body = await served.post(session, {"messages": [USER], "n": 2})
    for choice in body["choices"]:
        await served.post(
            session, {"messages": [USER, choice["message"], {"role": "user", "content": "and?"}]}
        )
    calls = (await served.inspect(session))["calls"]
    assert [c["parent_id"] for c in calls[2:]] == [c["call_id"] for c in calls[:2]]


async def test_siblings_that_say_the_same_are_told_apart_by_their_tool_call_ids(served: Served) -> None:
    served.fleet.say(tool_call(), tool_call())
    session = await served.open()
    _, _, body = await served.post(session, {"messages": [USER], "n": 2, "tools": [CALCULATOR]})
    for choice in body["choices"]:
        m = choice["message"]
        result = {"role": "tool", "tool_call_id": m["tool_calls"][0]["id"], "content": "5"}
        await served.post(session, {"messages": [USER, m, result], "tools": [CALCULATOR]})
    calls = (await served.inspect(session))["calls"]
    assert [c["parent_id"] for c in calls[2:]] == [c["call_id"] for c in calls[:2]]


class TestCauses:
    """Why a call extends no other."""

    async def causes(self, served: Served, session: Any) -> list[str | None]:
        return [c["branch_cause"] for c in (await served.inspect(session))["calls"]]

    async def test_a_conversation_of_its_own_is_a_root(self, served: Served) -> None:
        session, _ = await first_turn(served)
        await served.post(session, {"messages": [{"role": "user", "content": "Name this chat"}]})
        assert await self.causes(served, session) == ["root", "root"]

    async def test_an_edited_history(self, served: Served) -> None:
        session, message = await first_turn(served)
        message["content"] = "I never said that."
        later = {"role": "tool", "content": "5"}
        await served.post(session, {"messages": [USER, message, later], "tools": [CALCULATOR]})
        assert await self.causes(served, session) == ["root", "edited"]
        # What was not sampled is rendered as text; what was is not touched.
        prompt = served.fleet.asked[1].prompt_ids
        assert "I never said that." in served.gateway.tokens.text(prompt)

    async def test_other_tools(self, served: Served) -> None:
        session, message = await first_turn(served)
        other = copy.deepcopy(CALCULATOR)
        other["function"]["description"] = "Something else."
        later = {"role": "tool", "content": "5"}
        await served.post(session, {"messages": [USER, message, later], "tools": [other]})
        assert await self.causes(served, session) == ["root", "tools_changed"]
        assert "Something else." in served.gateway.tokens.text(served.fleet.asked[1].prompt_ids)

    async def test_a_bridge_that_the_renderer_refuses(self, served: Served) -> None:
        session, message = await first_turn(served)
        later = [{"role": "assistant", "content": "I add this myself."}, {"role": "user", "content": "?"}]
        await served.post(session, {"messages": [USER, message, *later], "tools": [CALCULATOR]})
        assert await self.causes(served, session) == ["root", "bridge_refused"]

    async def test_a_compacted_history(self, served: Served) -> None:
        session, message = await first_turn(served)
        messages = [USER, message, {"role": "tool", "content": "5"}]
        await served.post(session, {"messages": messages, "tools": [CALCULATOR]})
        summary = {"role": "user", "content": "So far: the calculator said 5."}
        await served.post(session, {"messages": [USER, summary], "tools": [CALCULATOR]})
        assert await self.causes(served, session) == ["root", None, "compacted"]

    async def test_going_back_is_a_branch_without_a_cause(self, served: Served) -> None:
        session, message = await first_turn(served)
        for content in ("5", "error"):
            later = {"role": "tool", "content": content}
            await served.post(session, {"messages": [USER, message, later], "tools": [CALCULATOR]})
        calls = (await served.inspect(session))["calls"]
        assert [c["parent_id"] for c in calls] == [None, calls[0]["call_id"], calls[0]["call_id"]]
