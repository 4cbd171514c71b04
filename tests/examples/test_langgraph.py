"""An unmodified graph is run as it is; each call it makes says which node made it.

The model is a small OpenAI-compatible server on loopback that records what it is sent.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from typing import Any

import langgraph_react
import pytest
import pytest_asyncio
from aiohttp import web
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from openai import AsyncOpenAI, OpenAI

from areal_adapters.langgraph import LangGraphAgent
from areal_agent.observe import bind, client_environment, observe, unobserve

# LangChain shares one HTTP client among all its chat models, and a client belongs to one event loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Model:
    """Calls the calculator with 2+3 until a tool has answered, then repeats what the tool said."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.url = ""
        self.loops = False

    async def reply(self, request: web.Request) -> web.Response:
        body = await request.json()
        labels = {k.lower(): v for k, v in request.headers.items() if k.lower().startswith("x-areal-label-")}
        self.requests.append((request.headers["authorization"], labels, body))
        last = body["messages"][-1]
        message: dict[str, Any] = {"role": "assistant", "content": f"The answer is {last['content']}."}
        if (self.loops or last["role"] != "tool") and body.get("tools"):
            function = {"name": "calculator", "arguments": '{"expression": "2+3"}'}
            call = {"id": "c1", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    def nodes(self) -> list[str]:
        return [labels.get("x-areal-label-node", "") for _, labels, _ in self.requests]


@pytest_asyncio.fixture(loop_scope="module")
async def model():
    model = Model()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", model.reply)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    model.url = "http://{}:{}".format(*runner.addresses[0][:2])
    observe()
    with client_environment(model.url):
        yield model
    unobserve()
    await runner.cleanup()


async def run(agent: LangGraphAgent, model: Model, key: str = "key-1") -> Any:
    with bind(f"{model.url}/v1", key):
        return await asyncio.wait_for(agent({"question": "2 and 3?"}), 30)


async def test_the_example_graph_loops_through_its_tool(model):
    agent = LangGraphAgent(langgraph_react.build_graph)
    assert await run(agent, model) == "The answer is 5."
    assert model.nodes() == ["think", "think"]


async def test_the_graph_goes_through_the_session_and_knows_nothing_of_it(model):
    await run(LangGraphAgent(langgraph_react.build_graph), model, key="key-of-the-session")
    assert {key for key, _, _ in model.requests} == {"Bearer key-of-the-session"}
    assert "areal" not in json.dumps([body for _, _, body in model.requests])


async def test_sessions_at_once_keep_their_keys_and_labels(model):
    agent = LangGraphAgent(langgraph_react.build_graph())
    answers = await asyncio.gather(*(run(agent, model, key=f"key-{i}") for i in range(8)))
    assert answers == ["The answer is 5."] * 8
    keys = [key for key, _, _ in model.requests]
    assert {key: keys.count(key) for key in keys} == {f"Bearer key-{i}": 2 for i in range(8)}
    assert set(model.nodes()) == {"think"}


async def test_a_prebuilt_agent_is_labelled_too(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # langgraph points to the `langchain` package, which we do not need
        from langgraph.prebuilt import create_react_agent

        graph = create_react_agent(ChatOpenAI(model="m"), [langgraph_react.calculator])
    assert await run(LangGraphAgent(graph), model) == "The answer is 5."
    assert model.nodes() == ["agent", "agent"]


def two_nodes(first: Any, second: Any, **compile_with: Any) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("first", first)
    graph.add_node("second", second)
    graph.add_edge(START, "first")
    graph.add_edge("first", "second")
    return graph.compile(**compile_with)


async def test_sync_and_async_nodes_with_langchain_and_bare_sdk_clients(model):
    def with_langchain(state: MessagesState) -> dict[str, Any]:
        return {"messages": [ChatOpenAI(model="m").invoke(state["messages"])]}

    def with_sdk(state: MessagesState) -> dict[str, Any]:
        reply = OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        return {"messages": [AIMessage(reply.choices[0].message.content or "")]}

    async def with_async_sdk(state: MessagesState) -> dict[str, Any]:
        reply = await AsyncOpenAI().chat.completions.create(
            model="m", messages=[{"role": "user", "content": "y"}]
        )
        return {"messages": [AIMessage(reply.choices[0].message.content or "")]}

    await run(LangGraphAgent(two_nodes(with_langchain, with_sdk)), model)
    await run(LangGraphAgent(two_nodes(with_async_sdk, with_langchain)), model)
    assert model.nodes() == ["first", "second", "first", "second"]


async def test_parallel_nodes_are_told_apart(model):
    def node(name: str) -> Any:
        async def ask(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await ChatOpenAI(model="m").ainvoke([("user", name)])]}

        return ask

    graph = StateGraph(MessagesState)
    for name in ("left", "right"):
        graph.add_node(name, node(name))
        graph.add_edge(START, name)
    await run(LangGraphAgent(graph.compile()), model)
    assert len(model.requests) == 2
    for _, labels, body in model.requests:
        assert labels["x-areal-label-node"] == body["messages"][0]["content"]


async def test_a_node_of_a_subgraph_says_where_it_is(model):
    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await ChatOpenAI(model="m").ainvoke(state["messages"])]}

    outer = StateGraph(MessagesState)
    outer.add_node("team", two_nodes(ask, ask))
    outer.add_edge(START, "team")
    await run(LangGraphAgent(outer.compile()), model)
    paths = [labels.get("x-areal-label-path") for _, labels, _ in model.requests]
    assert model.nodes() == ["first", "second"]
    assert paths == ["team/first", "team/second"]


async def test_a_call_outside_any_graph_has_no_label(model):
    LangGraphAgent(langgraph_react.build_graph)
    with bind(f"{model.url}/v1", "key"):
        await ChatOpenAI(model="m").ainvoke("hi")
    assert model.requests[0][1] == {}


async def test_a_checkpointer_does_not_mix_sessions(model):
    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await ChatOpenAI(model="m").ainvoke(state["messages"])]}

    agent = LangGraphAgent(two_nodes(ask, ask, checkpointer=InMemorySaver()))
    await run(agent, model)
    await run(agent, model)
    assert [len(body["messages"]) for _, _, body in model.requests] == [1, 2, 1, 2]


async def test_input_and_output_can_be_said(model):
    agent = LangGraphAgent(
        langgraph_react.build_graph,
        input=lambda task: {"messages": [("user", task["question"].upper())]},
        output=lambda state: len(state["messages"]),
    )
    assert await run(agent, model) == 4
    assert model.requests[0][2]["messages"][0]["content"] == "2 AND 3?"


async def test_a_looping_graph_fails_unless_it_is_said_what_that_gives(model):
    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await ChatOpenAI(model="m").ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", "ask")
    limit = {"recursion_limit": 3}
    with pytest.raises(GraphRecursionError):
        await run(LangGraphAgent(graph.compile(), config=limit), model)
    told = LangGraphAgent(graph.compile(), config=limit, on_recursion=lambda task: task["question"])
    assert await run(told, model) == "2 and 3?"


async def test_the_example_gives_a_loop_no_answer_and_so_no_reward_but_zero(model, monkeypatch):
    monkeypatch.setattr(model, "loops", True)
    result = await run(langgraph_react.agent, model)
    assert result is None
    assert langgraph_react.reward({"question": "2 and 3?", "answer": 5}, result) == 0.0
