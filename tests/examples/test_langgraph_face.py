"""What LangGraphAgent takes, by default and by mistake."""

from __future__ import annotations

import subprocess
import sys

import pytest
from langchain_core.messages import AIMessage
from langgraph.graph import MessagesState, StateGraph

from areal_adapters.langgraph import LangGraphAgent, graph_input, graph_output
from areal_agent.errors import AgentError, ConfigError


def test_defaults_of_input_and_output():
    assert graph_input({"messages": [1]}) == {"messages": [1]}
    assert graph_input({"prompt": "hi", "answer": 2}) == {"messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(AgentError, match=r"\['answer'\].*pass input="):
        graph_input({"answer": 2})
    assert graph_output({"answer": 3}) == {"answer": 3}
    blocks = [{"type": "text", "text": "a"}, "b", {"type": "image"}]
    assert graph_output({"messages": [AIMessage("no"), AIMessage(blocks)]}) == "ab"


def test_what_is_no_compiled_graph_is_refused_with_a_sentence():
    with pytest.raises(ConfigError, match=r"StateGraph: call \.compile\(\) on it first"):
        LangGraphAgent(StateGraph(MessagesState))
    with pytest.raises(ConfigError, match="str: pass a compiled graph"):
        LangGraphAgent("graph")


def test_without_langgraph_the_error_says_what_to_install():
    program = (
        "import sys; sys.modules['langgraph'] = None\n"
        "from areal_adapters.langgraph import LangGraphAgent\n"
        "try: LangGraphAgent(lambda: None)\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert out.stdout.startswith("ConfigError")
    assert "pip install 'areal-agent[langgraph]'" in out.stdout
