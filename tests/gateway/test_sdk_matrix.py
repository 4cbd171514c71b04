"""Every SDK that agents use, over what it can ask for: what it reads is what was sampled, and so is the ledger.

Rows are clients, columns are streaming, tools, siblings and logprobs. Each cell asserts the text or the tool
calls, the usage, and that the ledger's ids are those that the engine was shown and sampled.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import agents
import pytest
from anthropic import Anthropic
from gateway_support import CALCULATOR, Served, tool_call
from langchain_openai import ChatOpenAI
from openai import OpenAI

ASK = "What is two plus three?"
TEXT = "It is five."
ARGUMENTS = {"expression": "2+3"}
FUNCTION = CALCULATOR["function"]
FLAT_TOOL = {"type": "function", **FUNCTION}
ANTHROPIC_TOOL = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}


@dataclass(frozen=True)
class Cell:
    stream: bool
    tools: bool
    n: int
    logprobs: bool


@dataclass
class Heard:
    """What a client made of the reply, in one shape: per choice its text and its (name, arguments)."""

    texts: list[str] = field(default_factory=list)
    calls: list[list[tuple[str, Any]]] = field(default_factory=list)
    usage: tuple[int, int] | None = None
    logprobs: list[list[float]] | None = None


Client = Callable[[Served, dict[str, Any], Cell], Any]


# -- openai ------------------------------------------------------------------------------------------------


def _chat_options(cell: Cell) -> dict[str, Any]:
    options: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": ASK}], "n": cell.n}
    if cell.tools:
        options["tools"] = [CALCULATOR]
    if cell.logprobs:
        options |= {"logprobs": True, "top_logprobs": 2}
    if cell.stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    return options


def _called(calls: Any) -> list[tuple[str, Any]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in calls or []]


def _chat_whole(body: Any) -> Heard:
    heard = Heard(usage=(body.usage.prompt_tokens, body.usage.completion_tokens))
    for choice in body.choices:
        heard.texts.append(choice.message.content or "")
        heard.calls.append(_called(choice.message.tool_calls))
    if body.choices[0].logprobs:
        heard.logprobs = [[t.logprob for t in c.logprobs.content] for c in body.choices]
    return heard


def _chat_chunks(chunks: list[Any], n: int) -> Heard:
    heard = Heard([""] * n, [[] for _ in range(n)])
    logprobs: list[list[float]] = [[] for _ in range(n)]
    for chunk in chunks:
        for choice in chunk.choices:
            heard.texts[choice.index] += choice.delta.content or ""
            heard.calls[choice.index] += _called(choice.delta.tool_calls)
            if choice.logprobs:
                logprobs[choice.index] += [t.logprob for t in choice.logprobs.content]
        if chunk.usage:
            heard.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
    heard.logprobs = logprobs if any(logprobs) else None
    return heard


async def openai_async(served: Served, session: Any, cell: Cell) -> Heard:
    reply = await served.openai(session).chat.completions.create(**_chat_options(cell))
    return _chat_chunks([c async for c in reply], cell.n) if cell.stream else _chat_whole(reply)


async def openai_sync(served: Served, session: Any, cell: Cell) -> Heard:
    def ask() -> Heard:
        with OpenAI(base_url=session["base_url"], api_key=session["api_key"]) as client:
            reply = client.chat.completions.create(**_chat_options(cell))
            return _chat_chunks(list(reply), cell.n) if cell.stream else _chat_whole(reply)

    return await asyncio.to_thread(ask)


def _response(body: Any) -> Heard:
    heard = Heard([""], [[]], (body.usage.input_tokens, body.usage.output_tokens))
    for item in body.output:
        if item.type == "function_call":
            heard.calls[0].append((item.name, json.loads(item.arguments)))
        elif item.type == "message":
            heard.texts[0] += item.content[0].text
            if item.content[0].logprobs:
                heard.logprobs = [[t.logprob for t in item.content[0].logprobs]]
    return heard


async def openai_responses(served: Served, session: Any, cell: Cell) -> Heard:
    options: dict[str, Any] = {"model": "m", "input": ASK}
    if cell.tools:
        options["tools"] = [FLAT_TOOL]
    if cell.logprobs:
        options |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    client = served.openai(session)
    if not cell.stream:
        return _response(await client.responses.create(**options))
    async with client.responses.stream(**options) as events:
        async for _ in events:
            pass
        return _response(await events.get_final_response())


# -- anthropic ---------------------------------------------------------------------------------------------


def _messages_options(cell: Cell) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model": "m",
        "max_tokens": 500,
        "messages": [{"role": "user", "content": ASK}],
    }
    return options | ({"tools": [ANTHROPIC_TOOL]} if cell.tools else {})


def _message(body: Any) -> Heard:
    return Heard(
        ["".join(b.text for b in body.content if b.type == "text")],
        [[(b.name, b.input) for b in body.content if b.type == "tool_use"]],
        (body.usage.input_tokens, body.usage.output_tokens),
    )


async def anthropic_async(served: Served, session: Any, cell: Cell) -> Heard:
    client = served.anthropic(session)
    if not cell.stream:
        return _message(await client.messages.create(**_messages_options(cell)))
    async with client.messages.stream(**_messages_options(cell)) as events:
        return _message(await events.get_final_message())


async def anthropic_sync(served: Served, session: Any, cell: Cell) -> Heard:
    def ask() -> Heard:
        with Anthropic(base_url=served.url, api_key=session["api_key"]) as client:
            if not cell.stream:
                return _message(client.messages.create(**_messages_options(cell)))
            with client.messages.stream(**_messages_options(cell)) as events:
                return _message(events.get_final_message())

    return await asyncio.to_thread(ask)


# -- langchain-openai --------------------------------------------------------------------------------------


def _langchain(responses: bool) -> Client:
    async def ask(served: Served, session: Any, cell: Cell) -> Heard:
        options: dict[str, Any] = {"use_responses_api": responses}
        if cell.logprobs:
            wish = {"include": ["message.output_text.logprobs"]} if responses else {"logprobs": True}
            options |= {**wish, "top_logprobs": 2}
        llm: Any = ChatOpenAI(
            model="m", base_url=session["base_url"], api_key=session["api_key"], stream_usage=True, **options
        )
        if cell.tools:
            llm = llm.bind_tools([CALCULATOR])
        if cell.stream:
            message = None
            async for chunk in llm.astream(ASK):
                message = chunk if message is None else message + chunk
        else:
            message = await llm.ainvoke(ASK)
        assert message is not None
        usage = message.usage_metadata
        heard = Heard(
            [message.text],
            [[(c["name"], c["args"]) for c in message.tool_calls]],
            (usage["input_tokens"], usage["output_tokens"]),
        )
        if told := message.response_metadata.get("logprobs"):
            heard.logprobs = [[t["logprob"] for t in told["content"]]]
        return heard

    return ask


# -- openai-agents -----------------------------------------------------------------------------------------


def _agents(model_type: Any) -> Client:
    async def ask(served: Served, session: Any, cell: Cell) -> Heard:
        @agents.function_tool(name_override="calculator")
        def calculator(expression: str) -> str:
            """Evaluates an expression."""
            return "5"

        agents.set_tracing_disabled(True)
        settings = agents.ModelSettings(
            include_usage=True, top_logprobs=2 if cell.logprobs else None, parallel_tool_calls=None
        )
        asked: dict[str, Any] = {
            "system_instructions": None,
            "input": ASK,
            "model_settings": settings,
            "tools": [calculator] if cell.tools else [],
            "output_schema": None,
            "handoffs": [],
            "tracing": agents.ModelTracing.DISABLED,
            "previous_response_id": None,
            "conversation_id": None,
            "prompt": None,
        }
        model = model_type(model="m", openai_client=served.openai(session))
        if cell.stream:
            last = None
            async for event in model.stream_response(**asked):
                last = event
            assert last is not None
            return _response(last.response)
        body = await model.get_response(**asked)
        heard = Heard([""], [[]], (body.usage.input_tokens, body.usage.output_tokens))
        for item in body.output:
            if item.type == "function_call":
                heard.calls[0].append((item.name, json.loads(item.arguments)))
            elif item.type == "message":
                heard.texts[0] += item.content[0].text
        return heard

    return ask


CLIENTS: dict[str, Client] = {
    "openai": openai_async,
    "openai, sync": openai_sync,
    "openai, responses": openai_responses,
    "anthropic": anthropic_async,
    "anthropic, sync": anthropic_sync,
    "langchain-openai": _langchain(responses=False),
    "langchain-openai, responses": _langchain(responses=True),
    "openai-agents": _agents(agents.OpenAIChatCompletionsModel),
    "openai-agents, responses": _agents(agents.OpenAIResponsesModel),
}
SIBLINGS = ("openai", "openai, sync")
"""Of the others none returns more than one reply."""
NO_LOGPROBS = ("anthropic", "anthropic, sync")
"""Their API has none."""
TOLD_LOGPROBS = ("openai", "openai, sync", "openai, responses", "langchain-openai")
"""Those whose shape hands logprobs on to the caller."""


def cells() -> list[Any]:
    out = []
    for name in CLIENTS:
        for stream, tools, n, logprobs in itertools.product(
            (False, True), (False, True), (1, 3), (False, True)
        ):
            if (n > 1 and name not in SIBLINGS) or (logprobs and name in NO_LOGPROBS):
                continue
            said = [w for w, on in (("stream", stream), ("tools", tools), ("logprobs", logprobs)) if on]
            out.append(
                pytest.param(
                    name, Cell(stream, tools, n, logprobs), id=f"{name}: {' '.join([*said, f'n={n}'])}"
                )
            )
    return out


@pytest.mark.parametrize(("name", "cell"), cells())
async def test_a_client_hears_what_was_sampled(served: Served, name: str, cell: Cell) -> None:
    said = [f"{TEXT} {i}\n{tool_call()}" if cell.tools else f"{TEXT} {i}" for i in range(cell.n)]
    served.fleet.say(*said)
    session = await served.open()
    heard = await CLIENTS[name](served, session, cell)

    assert heard.texts == [f"{TEXT} {i}" for i in range(cell.n)]
    assert heard.calls == [[("calculator", ARGUMENTS)] if cell.tools else []] * cell.n
    asked = served.fleet.asked
    assert len(asked) == cell.n
    assert heard.usage == (len(asked[0].prompt_ids), sum(len(a.output_ids) for a in asked))
    opened = served.gateway.sessions.get_open(session["session_id"])
    assert opened is not None
    records = opened.history.calls
    for record, a in zip(sorted(records, key=lambda r: r.index), asked, strict=True):
        assert list(record.suffix_ids) == a.prompt_ids
        assert list(record.output_ids) == a.output_ids
    if cell.logprobs:
        assert all(a.sampling.top_logprobs == 2 for a in asked)
    if cell.logprobs and name in TOLD_LOGPROBS:
        assert heard.logprobs == [list(r.logprobs) for r in sorted(records, key=lambda r: r.index)]
    sealed = await served.seal(session, reward=1.0)
    assert sealed["trained_tokens"] == sum(len(a.output_ids) for a in asked)
