"""Recorded conversations of real agent frameworks, replayed byte for byte: no splice is wrong.

The replies are written as the template writes them, so every prompt, continued or not, must read as the
whole conversation does when it is rendered afresh by the oracle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gateway_support import Served
from test_session_trees import chatml

from areal_gateway.tree import conversation

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
CAUSES = {
    "anthropic_tool_loop": ["root", None, None],
    "langgraph_react": ["root", None, None, None],
    # The solver has another system message and other tools: a conversation of its own.
    "openai_agents_handoff": ["root", "root", None],
    "responses_loop": ["root", None, None],
}


def test_every_recording_is_expected() -> None:
    assert [f.stem for f in RECORDED] == sorted(CAUSES)


@pytest.mark.parametrize(
    ("name", "log"), [pytest.param(f.stem, json.loads(f.read_text()), id=f.stem) for f in RECORDED]
)
async def test_a_recorded_conversation_is_spliced_exactly(
    served: Served, name: str, log: list[dict[str, Any]]
) -> None:
    session = await served.open()
    opened = served.gateway.sessions.get_open(session["session_id"])
    assert opened is not None
    new_ids: dict[str, str] = {}
    for entry in log:
        body = json.dumps(entry["body"])
        for old, new in new_ids.items():
            body = body.replace(old, new)
        served.fleet.say(entry["said"])
        status, headers, answer = await served.post(session, json.loads(body), path=entry["path"])
        assert status == 200, answer
        assert "x-areal-ignored" not in headers
        record = opened.history.calls[-1]
        new_ids |= dict(zip(entry["ids"], (record.exchange_id, record.call_id), strict=True))
        node = opened.tree.node(record.call_id)
        assert node is not None
        asked = served.fleet.asked[-1]
        if node.parent is not None:
            stored = node.parent.ids().tolist()
            assert asked.prompt_ids[: len(stored)] == stored
        whole = chatml(conversation(node)[:-1], record.tools)
        assert served.gateway.tokens.text(asked.prompt_ids) == whole
    assert [c.cause for c in opened.history.calls] == CAUSES[name] == [e["cause"] for e in log]
    sealed = await served.seal(session, reward=1.0)
    assert sealed["trained_tokens"] == sum(len(a.output_ids) for a in served.fleet.asked)
