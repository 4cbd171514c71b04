"""Writes recorded/*.json: what real agent frameworks send, conversation by conversation.

Run it after a framework changed its ways, look at the causes in the difference, and commit the files:

    PYTHONPATH=tests:tests/gateway python tests/gateway/record_conversations.py
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import agents
from aiohttp import web
from gateway_support import CALCULATOR, Served, build_model_folder, make_app, tool_call
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

from areal_agent.config import GatewayConfig
from areal_gateway.tokens import Tokens

FOLDER = Path(__file__).parent / "recorded"
ASK = "What is two plus three?"
CALL = "Let me see.\n" + tool_call()
FUNCTION = CALCULATOR["function"]


def calculator(expression: str) -> str:
    """Evaluates an expression."""
    return "5"


async def langgraph_react(served: Served, session: dict[str, Any]) -> None:
    llm = ChatOpenAI(model="m", base_url=session["base_url"], api_key=session["api_key"])
    graph = create_react_agent(llm, [calculator], prompt="You calculate.")
    state = await graph.ainvoke({"messages": [("user", ASK)]})
    await graph.ainvoke({"messages": [*state["messages"], ("user", "Thanks. And again?")]})


async def openai_agents_handoff(served: Served, session: dict[str, Any]) -> None:
    agents.set_tracing_disabled(True)
    model = agents.OpenAIChatCompletionsModel(model="m", openai_client=served.openai(session))
    tool = agents.function_tool(calculator)
    solver = agents.Agent(name="Solver", instructions="You solve.", tools=[tool], model=model)
    triage = agents.Agent(name="Triage", instructions="You triage.", handoffs=[solver], model=model)
    await agents.Runner.run(triage, ASK)


async def anthropic_tool_loop(served: Served, session: dict[str, Any]) -> None:
    client = served.anthropic(session)
    tool = {
        "name": "calculator",
        "description": FUNCTION["description"],
        "input_schema": FUNCTION["parameters"],
    }
    messages: list[Any] = [{"role": "user", "content": ASK}]
    while True:
        reply = await client.messages.create(
            model="m", max_tokens=500, system="You calculate.", tools=[tool], messages=messages
        )
        messages.append({"role": "assistant", "content": reply.content})
        uses = [b for b in reply.content if b.type == "tool_use"]
        if not uses:
            return
        results = [{"type": "tool_result", "tool_use_id": u.id, "content": "5"} for u in uses]
        messages.append({"role": "user", "content": results})


async def responses_loop(served: Served, session: dict[str, Any]) -> None:
    client = served.openai(session)
    tool: Any = {"type": "function", **FUNCTION}
    asked: Any = ASK
    previous = None
    while True:
        reply = await client.responses.create(
            model="m", input=asked, tools=[tool], instructions="You calculate.", previous_response_id=previous
        )
        calls = [i for i in reply.output if i.type == "function_call"]
        if not calls:
            return
        asked = [{"type": "function_call_output", "call_id": c.call_id, "output": "5"} for c in calls]
        previous = reply.id


Talk = Callable[[Served, dict[str, Any]], Awaitable[None]]
CONVERSATIONS: dict[str, tuple[Talk, list[str]]] = {
    "langgraph_react": (langgraph_react, [CALL, "It is five.", CALL, "Five again."]),
    "openai_agents_handoff": (
        openai_agents_handoff,
        [tool_call("transfer_to_solver", "{}"), CALL, "It is five."],
    ),
    "anthropic_tool_loop": (anthropic_tool_loop, [CALL, CALL, "It is five."]),
    "responses_loop": (responses_loop, [CALL, CALL, "It is five."]),
}


async def record(name: str, folder: Path, tokens: Tokens) -> list[dict[str, Any]]:
    talk, said = CONVERSATIONS[name]
    served = make_app(tokens, folder)
    requests: list[tuple[str, Any]] = []

    @web.middleware
    async def listen(request: web.Request, handler: Any) -> Any:
        if request.path.startswith("/v1/"):
            requests.append((request.path, await request.json()))
        return await handler(request)

    served.app.middlewares.append(listen)
    await served.start()
    served.fleet.say(*said)
    session = await served.open()
    await talk(served, session)
    calls = (await served.inspect(session))["calls"]
    await served.stop()
    assert len(calls) == len(requests) == len(said)
    return [
        {
            "path": path,
            "body": body,
            "said": text,
            "ids": [call["exchange_id"], call["call_id"]],
            "cause": call["branch_cause"],
        }
        for (path, body), text, call in zip(requests, said, calls, strict=True)
    ]


async def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        model = build_model_folder(Path(temporary) / "model")
        tokens = Tokens.load(model, GatewayConfig())
        for name in CONVERSATIONS:
            folder = Path(temporary) / name
            folder.mkdir()
            log = await record(name, folder, tokens)
            (FOLDER / f"{name}.json").write_text(json.dumps(log, indent=1) + "\n")
            print(name, [entry["cause"] for entry in log])


if __name__ == "__main__":
    asyncio.run(main())
