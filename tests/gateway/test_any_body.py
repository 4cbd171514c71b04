"""Whatever JSON a client sends, a dialect reads it or says in a sentence why not."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agent.errors import GatewayError
from areal_gateway.dialects import COUNTERS, DIALECTS

ROWS = {path: row for path, row in (*DIALECTS.items(), *COUNTERS.items())}
WORDS = st.sampled_from(
    [
        "user",
        "assistant",
        "system",
        "tool",
        "developer",
        "text",
        "thinking",
        "tool_use",
        "tool_result",
        "function",
        "function_call",
        "function_call_output",
        "reasoning",
        "message",
        "item_reference",
        "output_text",
        "auto",
        "none",
        "enabled",
        "resp_1",
        "msg_1",
    ]
)
KEYS = st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "name",
        "id",
        "call_id",
        "input",
        "output",
        "arguments",
        "tool_calls",
        "function",
        "parameters",
        "summary",
        "input_schema",
        "tool_use_id",
        "thinking",
        "format",
    ]
)
LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-1, 2**40)
    | st.floats(allow_nan=False)
    | WORDS
    | st.text(max_size=5)
)
VALUE = st.recursive(
    LEAF, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS | WORDS, v, max_size=4), max_leaves=12
)


class NoPast:
    def conversation(self, exchange_id: str) -> list[dict[str, Any]] | None:
        return None


@pytest.mark.parametrize("path", ROWS)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_it_is_read_or_refused(path: str, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(ROWS[path].fields))
    fields = data.draw(st.dictionaries(names, VALUE, max_size=6))
    if "max_tokens" in ROWS[path].fields:  # where it is required, a body without it ends there
        fields.setdefault("max_tokens", 5)
    error = None
    try:
        ROWS[path].read(fields, NoPast())
    except GatewayError as e:
        error = e
    if error is not None:
        assert error.status == 400
        assert orjson.loads(ROWS[path].error(error))["error"]["message"] == str(error)
