"""The short way through Qwen3's grammar gives what the renderer gives on all of it."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_families import FAMILIES

from areal_agent.config import GatewayConfig
from areal_gateway.tokens import Tokens
from areal_gateway.tokens_qwen3 import Qwen3Tokens

USER = {"role": "user", "content": "2 + 3?"}
TOOL = {"role": "tool", "tool_call_id": "x", "content": "five"}
NEXT = [TOOL, {"role": "user", "content": " and\nthen? "}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
PIECES = (
    *("five ", "\n\n", " ", "naïve 漢字", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"),
    *(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_start|>assistant\n",
        CALL,
        CALL,
        '{"name": 1}',
        "<tool_response>",
    ),
)
words = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "thinking"])
def tokens(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = FAMILIES["qwen3_like"](tmp_path_factory.mktemp("qwen3"))
    found = Tokens.load(folder, GatewayConfig(enable_thinking=request.param))
    assert isinstance(found, Qwen3Tokens)
    return found


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@settings(max_examples=300, deadline=None)
@given(
    system=st.none() | words,
    asked=st.lists(words | st.sampled_from(["", "\n", " \n x ", "user\n", "'s"]), min_size=1, max_size=3),
    tools=st.sampled_from([[], TOOLS]),
)
def test_first_questions_are_framed_the_same(
    tokens: Tokens, system: str | None, asked: list[str], tools: list[dict]
) -> None:
    """Whatever they say, and the system prompt before them: the markup of turns included."""
    before = [] if system is None else [{"role": "system", "content": system}]
    for question in asked:
        messages = [*before, {"role": "user", "content": question}]
        assert tokens.render(messages, tools) == Tokens.render(tokens, messages, tools)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "2 + 3?"}]}],
        [{"role": "system", "content": [{"type": "text", "text": "Add."}]}, USER],
        [USER, USER],
        [{"role": "system", "content": "Add."}, {"role": "system", "content": "Now."}, USER],
        [{"role": "system", "content": "Add."}],
        [{"role": "assistant", "content": "five"}, USER],
        [{"role": "system"}, USER],
    ],
)
def test_other_beginnings_too(tokens: Tokens, messages: list[dict]) -> None:
    assert tokens.render(messages, TOOLS) == Tokens.render(tokens, messages, TOOLS)


@settings(max_examples=400, deadline=None)
@example(began="<|im_start|>assistant\n<think>", said="", ended="")
@given(began=words, said=words, ended=st.sampled_from(["", "<|im_end|>", "<|endoftext|>"]))
def test_a_reply_reads_the_same(tokens: Tokens, began: str, said: str, ended: str) -> None:
    prompt = tokens.render([USER], []) + tokens.tokenizer.encode(began)
    output = tokens.tokenizer.encode(said + ended)
    assert tokens.parse(output, prompt, []) == Tokens.parse(tokens, output, prompt, [])


@settings(max_examples=400, deadline=None)
@given(
    began=words, said=words, ended=st.sampled_from(["", "<|im_end|>", "<|endoftext|>"]), new=st.integers(1, 2)
)
def test_a_conversation_goes_on_the_same(tokens: Tokens, began: str, said: str, ended: str, new: int) -> None:
    prompt = tokens.render([USER], []) + tokens.tokenizer.encode(began)
    output = tokens.tokenizer.encode(said + ended)
    args = ([], prompt, output, NEXT[:new], [])
    assert tokens.bridge(*args) == Tokens.bridge(tokens, *args)


@settings(max_examples=300, deadline=None)
@given(
    results=st.lists(
        words | st.sampled_from(["", "\n", "\n\n ", "</tool_response>"]), min_size=1, max_size=10
    ),
    ended=st.sampled_from(["", "<|im_end|>", "<|endoftext|>"]),
)
def test_tool_results_are_framed_the_same(tokens: Tokens, results: list[str], ended: str) -> None:
    """Whatever they say, the markup that frames them included, and in whichever order frames are first asked for."""
    prompt = tokens.render([USER], [])
    args = (
        [],
        prompt,
        tokens.tokenizer.encode("five " + CALL + ended),
        [TOOL | {"content": r} for r in results],
        [],
    )
    assert tokens.bridge(*args) == Tokens.bridge(tokens, *args)


def test_a_bridge_that_is_refused_once_is_not_refused_for_good(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ([], tokens.render([USER], []), tokens.tokenizer.encode("five<|im_end|>"), NEXT[:1] * 8, [])
    tokens._frames.clear()  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        patched.setattr(tokens.renderer, "bridge_to_next_turn", lambda *_, **__: None)
        assert tokens.bridge(*args) is None
    assert tokens.bridge(*args) == Tokens.bridge(tokens, *args) is not None


def test_the_short_way_is_taken(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it the renderer is shown little of a long conversation."""
    prompt = tokens.render([USER, {"role": "assistant", "content": "five " * 500}, USER], [])
    output = tokens.tokenizer.encode("five " * 300 + CALL + "<|im_end|>")
    shown: list[int] = []
    parse, bridge = tokens.renderer.parse_response, tokens.renderer.bridge_to_next_turn

    def parsing(ids: list[int], **rest: object) -> object:
        shown.append(len(ids))
        return parse(ids, **rest)  # type: ignore[arg-type]

    def bridging(before: list[int], said: list[int], new: object, **rest: object) -> object:
        shown.append(len(before) + len(said))
        return bridge(before, said, new, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tokens.renderer, "parse_response", parsing)
    monkeypatch.setattr(tokens.renderer, "bridge_to_next_turn", bridging)
    assert tokens.parse(output, prompt, []).tool_calls[0].name == "add"
    assert len(shown) == 1
    for _ in range(2):
        assert tokens.bridge([], prompt, output, NEXT[:1], []) is not None
    assert len(shown) <= 2  # what stands around a tool's result is asked for once, by an earlier test perhaps
    assert sum(shown) < 100
