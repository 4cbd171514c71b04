"""LangGraph: an unmodified compiled graph as the agent, its model calls labelled with the node that made them.

Invariant: the graph is invoked exactly as its owner would invoke it; what training needs to know is read
from LangGraph's own run context at the moment a request is sent.

    from areal_adapters.langgraph import LangGraphAgent
    areal_agent.train(LangGraphAgent(graph), reward, dataset=...)
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from areal_agent.errors import AgentError, ConfigError
from areal_agent.observe import add_label_source

QUESTION_KEYS = ("question", "prompt", "input", "task", "query")
"""Where the default input looks for the user's text in a task that holds no `messages`."""


class LangGraphAgent:
    """Runs a compiled graph on a task; pass it wherever an agent is wanted.

    Every model call carries the label `node`, and, inside a subgraph, `path`, such as `team/researcher`.
    """

    def __init__(
        self,
        graph: Any,
        *,
        input: Callable[[Mapping[str, Any]], Any] | None = None,
        output: Callable[[Any], Any] | None = None,
        config: Mapping[str, Any] | None = None,
        on_recursion: Callable[[Mapping[str, Any]], Any] | None = None,
    ) -> None:
        """Args:
            graph: what `StateGraph(...).compile()` or `create_agent(...)` returned, or a function without
                arguments that makes it, called at the first task (a chat model wants its key when it is built,
                and the session's is there by then).
            input: task -> the graph's input; by default its `messages`, else one user message of its question.
            output: final state -> the agent's result; by default the text of the last message, else the state.
            config: RunnableConfig for every invocation, such as {"recursion_limit": 10}.
            on_recursion: task -> the agent's result where the graph reached its recursion limit, so that the
                reward function can say what looping is worth; by default the error ends the session, whose
                reward is then missing.

        Raises:
            ConfigError: langgraph is not installed, or `graph` is neither a compiled graph nor a function.
        """
        _install_labels()
        if not hasattr(graph, "ainvoke") and not callable(graph):
            hint = "call .compile() on it first" if hasattr(graph, "compile") else "pass a compiled graph"
            raise ConfigError(f"LangGraphAgent got a {type(graph).__name__}: {hint}")
        self._graph = graph
        self._input = input or graph_input
        self._output = output or graph_output
        self._config = dict(config or {})
        self._on_recursion = on_recursion

    @functools.cached_property
    def graph(self) -> Any:
        """The compiled graph, made now if a function was given."""
        if hasattr(self._graph, "ainvoke"):
            return self._graph
        made = self._graph()
        if not hasattr(made, "ainvoke"):
            raise ConfigError(f"LangGraphAgent's function made a {type(made).__name__}, not a compiled graph")
        return made

    async def __call__(self, task: Mapping[str, Any]) -> Any:
        """Run the graph on one task. Raises whatever the graph raises."""
        configurable = {"thread_id": uuid.uuid4().hex, **self._config.get("configurable", {})}
        config = {**self._config, "configurable": configurable}  # a checkpointer must not mix two sessions
        from langgraph.errors import GraphRecursionError

        try:
            state = await self.graph.ainvoke(self._input(task), config)
        except GraphRecursionError:
            if self._on_recursion is None:
                raise
            return self._on_recursion(task)
        return self._output(state)


def graph_input(task: Mapping[str, Any]) -> dict[str, Any]:
    """The input of a graph over `messages`. Raises AgentError when the task holds no text to send."""
    if "messages" in task:
        return {"messages": task["messages"]}
    for key in QUESTION_KEYS:
        if isinstance(task.get(key), str):
            return {"messages": [{"role": "user", "content": task[key]}]}
    raise AgentError(
        f"the task has the keys {sorted(task)}; LangGraphAgent sends `messages`, or the text under one of "
        f"{', '.join(QUESTION_KEYS)}: pass input=lambda task: ... to say what the graph gets"
    )


def graph_output(state: Any) -> Any:
    """The text of the last message of a final state; the state itself where it has no messages."""
    messages = state.get("messages") if isinstance(state, Mapping) else None
    if not messages:
        return state
    content = getattr(messages[-1], "content", messages[-1])
    if isinstance(content, list):  # content blocks
        return "".join(b if isinstance(b, str) else b.get("text", "") for b in content)
    return content


@functools.cache
def _install_labels() -> None:
    """Label calls from now on; once a process, whatever the number of agents. Raises ConfigError."""
    try:
        from langgraph.config import get_config
    except ImportError as e:
        raise ConfigError(
            "LangGraphAgent needs LangGraph, which is not installed: pip install 'areal-agent[langgraph]'"
        ) from e

    def labels() -> dict[str, str]:
        try:
            metadata = get_config().get("metadata") or {}
        except RuntimeError:  # not inside a graph's run
            return {}
        node = metadata.get("langgraph_node")
        if not node:
            return {}
        # "team:3f2a…|researcher:77b0…": one part per level of subgraphs, ids of the run after the colon.
        space = str(metadata.get("langgraph_checkpoint_ns") or "")
        path = [part.partition(":")[0] for part in space.split("|") if part]
        return {"node": str(node), **({"path": "/".join(path)} if len(path) > 1 else {})}

    add_label_source(labels)
