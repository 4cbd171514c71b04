"""The calculator task as a LangGraph ReAct agent, trained without a change to the graph.

The graph is LangGraph's own pattern: a model node, a tool node, an edge back. `LangGraphAgent` runs it and
labels each model call with the node that made it.

    python examples/agents/langgraph_react.py
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from calculator import calculate, dataset, eval_dataset, model, reward
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from areal_adapters.langgraph import LangGraphAgent

__all__ = ["agent", "dataset", "eval_dataset", "model", "reward"]

# ---------------------------------------------------------------- the graph


@tool
def calculator(expression: str) -> str:
    """Compute a sum."""
    return calculate(expression)


def build_graph() -> Any:
    """An ordinary compiled graph; nothing here is about training."""
    chat = ChatOpenAI(model="policy").bind_tools([calculator])

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile()


# ---------------------------------------------------------------- its training

# A model that never stops calling the tool is cut off; it then has no answer, which `reward` gives 0.
agent = LangGraphAgent(build_graph, config={"recursion_limit": 9}, on_recursion=lambda task: None)


def main() -> None:
    import areal_agent

    result = areal_agent.train(
        agent,
        reward,
        dataset=dataset(),
        eval_dataset=eval_dataset(),
        model=model(),
        config={"name": "langgraph_react"},
    )
    print(f"held-out reward {result.reward_before:.2f} -> {result.reward_after:.2f}")
    calls = calls_by_node(result.run_dir)
    print(", ".join(f"{count} calls made by node {node or '(no label)'!r}" for node, count in calls.items()))
    if not calls or calls[""]:
        sys.exit("not every call is labelled with its node")


def calls_by_node(run_dir: Path) -> Counter[str]:
    """How many calls of the run each node made, from the run's ledger; "" counts those without a label."""
    with contextlib.closing(sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        return Counter(
            json.loads(labels).get("node", "") for (labels,) in ledger.execute("SELECT labels FROM calls")
        )


if __name__ == "__main__":
    main()
