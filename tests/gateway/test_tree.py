"""A request's chain is that of its messages, whatever was asked before."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from areal_gateway import canonical
from areal_gateway.tree import CallTree

values = st.sampled_from([1, True, 1.0, None, "1", [], {}, "", "a", "},{", [{"type": "text", "text": "a"}]])
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": values},
    optional={
        "name": st.sampled_from(["n", "m"]),
        "tool_calls": values.map(lambda v: [{"function": {"name": "f", "arguments": {"x": v}}}]),
    },
)


def call(argument: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": argument}}}]}


@settings(max_examples=500, deadline=None)
@example([([call(True)], 0), ([{"role": "user", "content": "a"}], 1)], call(1))
@given(
    steps=st.lists(st.tuples(st.lists(messages, min_size=1, max_size=3), st.integers(0, 4)), max_size=6),
    other=messages,
)
def test_a_chain_is_that_of_its_messages(
    steps: list[tuple[list[dict[str, Any]], int]], other: dict[str, Any]
) -> None:
    """Requests that go on, go on from earlier, tell something differently, or come again."""
    tree, asked = CallTree(), []
    for new, kept in steps:
        asked = [*asked[:kept], *new]
        for request in (asked, [other, *asked[1:]], [*asked, other], asked):
            assert tree.attach(request, []).keys == canonical.chain(request)
