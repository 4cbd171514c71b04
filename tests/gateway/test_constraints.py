"""JSON formats and forced tools: passed to the engine, kept out of training, or said to have no effect."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from gateway_support import CALCULATOR, Served, build_model_folder, make_app, tool_call
from transformers import PreTrainedTokenizerFast

from areal_agent.config import GatewayConfig
from areal_gateway.constraint import Constraint
from areal_gateway.fleet.protocol import EngineRefused
from areal_gateway.tokens import ReplySyntax, Tokens

ASK = [{"role": "user", "content": "What is two plus three?"}]
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
FLAT = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
NESTED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
JSON_ONLY = {"json": SCHEMA}
FLAT_TOOL = {"type": "function", **CALCULATOR["function"]}
ANTHROPIC_TOOL = {"name": "calculator", "input_schema": CALCULATOR["function"]["parameters"]}

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TALK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK},
    RESPONSES: {"input": "What is two plus three?"},
    MESSAGES: {"messages": ASK, "max_tokens": 100},
}
FORMATS = [
    (CHAT, {"response_format": NESTED}, SCHEMA),
    (CHAT, {"response_format": {"type": "json_object"}}, {"type": "object"}),
    (RESPONSES, {"text": {"format": FLAT}}, SCHEMA),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, {"type": "object"}),
    (MESSAGES, {"output_config": {"format": FLAT}}, SCHEMA),
    (MESSAGES, {"output_format": FLAT}, SCHEMA),
]
OTHER = {"type": "function", "function": {**CALCULATOR["function"], "name": "other"}}
FORCED = [
    (CHAT, {"tools": [CALCULATOR], "tool_choice": "required"}),
    (CHAT, {"tools": [CALCULATOR], "tool_choice": {"type": "function", "function": {"name": "calculator"}}}),
    (
        CHAT,
        {
            "tools": [CALCULATOR, OTHER],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "calculator"}}],
                },
            },
        },
    ),
    (RESPONSES, {"tools": [FLAT_TOOL], "tool_choice": "required"}),
    (RESPONSES, {"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "calculator"}}),
    (MESSAGES, {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}}),
    (MESSAGES, {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "calculator"}}),
]
FREE = [
    (CHAT, {"response_format": {"type": "text"}, "tools": [CALCULATOR], "tool_choice": "auto"}),
    (CHAT, {"tools": [CALCULATOR], "tool_choice": "none"}),
    (RESPONSES, {"text": {"format": {"type": "text"}}, "tools": [FLAT_TOOL], "tool_choice": "auto"}),
    (MESSAGES, {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "auto"}}),
    (MESSAGES, {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "none"}}),
]


def outputs(served: Served, i: int = -1) -> Any:
    return served.fleet.asked[i].sampling.extra.get("structured_outputs")


async def ask(served: Served, path: str, extra: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """(session, headers) of one served request."""
    session = await served.open()
    status, headers, body = await served.post(session, {"model": "m", **TALK[path], **extra}, path=path)
    assert status == 200, body
    return session, headers


@pytest.mark.parametrize(("path", "extra", "schema"), FORMATS)
async def test_a_json_format_reaches_the_engine(
    served: Served, path: str, extra: dict[str, Any], schema: Any
) -> None:
    _, headers = await ask(served, path, extra)
    assert outputs(served) == {"json": schema}
    assert "x-areal-ignored" not in headers


@pytest.mark.parametrize(("path", "extra"), FORCED)
async def test_a_forced_tool_reaches_the_engine(served: Served, path: str, extra: dict[str, Any]) -> None:
    served.fleet.say(tool_call())
    _, headers = await ask(served, path, extra)
    form = json.loads(outputs(served)["structural_tag"])["format"]
    (tag,) = form["tags"]
    assert tag["content"]["elements"][1]["json_schema"]["properties"]["name"] == {"const": "calculator"}
    assert "x-areal-ignored" not in headers


@pytest.mark.parametrize(("path", "extra"), FREE)
async def test_what_constrains_nothing_is_trained(served: Served, path: str, extra: dict[str, Any]) -> None:
    session, headers = await ask(served, path, extra)
    assert outputs(served) is None
    assert "x-areal-ignored" not in headers
    assert (await served.inspect(session))["calls"][0]["state"] == "complete"


async def test_a_constrained_call_is_context_and_its_continuation_is_trained(served: Served) -> None:
    session = await served.open()
    served.fleet.say('{"sum": 5}', "Five.")
    _, _, body = await served.post(session, {"messages": ASK, "response_format": NESTED})
    reply = body["choices"][0]["message"]
    assert body["choices"][0]["finish_reason"] == "stop"
    await served.post(session, {"messages": [*ASK, reply, {"role": "user", "content": "In words?"}]})
    first, second = served.fleet.asked
    shown = first.prompt_ids + first.output_ids
    assert second.prompt_ids[: len(shown)] == shown
    body = await served.inspect(session, trajectory=True)
    assert [c["state"] for c in body["calls"]] == ["constrained", "complete"]
    assert "constrained" in body["calls"][0]["incomplete_reason"]
    (sequence,) = body["sequences"]
    assert sequence["token_ids"] == second.prompt_ids + second.output_ids
    mask = [False] * len(second.prompt_ids) + [True] * len(second.output_ids)
    assert sequence["loss_mask"] == mask


@pytest.mark.parametrize(
    ("path", "extra", "named"),
    [
        (CHAT, {"response_format": NESTED}, "response_format"),
        (RESPONSES, {"text": {"format": FLAT}}, "text"),
        (MESSAGES, {"output_config": {"format": FLAT}}, "output_config"),
        (CHAT, {"tools": [CALCULATOR], "tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_switched_off_it_is_said_to_have_no_effect_and_the_call_is_trained(
    tokens: Tokens, tmp_path: Path, path: str, extra: dict[str, Any], named: str
) -> None:
    gateway = make_app(tokens, tmp_path, gateway={"constrain": False})
    await gateway.start()
    try:
        session, headers = await ask(gateway, path, extra)
        assert headers["x-areal-ignored"] == named
        assert outputs(gateway) is None
        assert (await gateway.inspect(session))["calls"][0]["state"] == "complete"
    finally:
        await gateway.stop()


@pytest.fixture
async def unknown(tmp_path: Path) -> AsyncIterator[Served]:
    """A model of which nobody knows how it thinks: its template writes <think> by itself."""
    folder = build_model_folder(
        tmp_path / "m",
        chat_template="{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}<think>",
        model_type="llama",
    )
    gateway = make_app(Tokens.load(folder, GatewayConfig()), tmp_path)
    await gateway.start()
    yield gateway
    await gateway.stop()


async def test_where_the_syntax_is_unknown_it_is_said_to_have_no_effect(unknown: Served) -> None:
    session, headers = await ask(unknown, CHAT, {"response_format": NESTED})
    assert headers["x-areal-ignored"] == "response_format"
    assert outputs(unknown) is None
    assert (await unknown.inspect(session))["calls"][0]["state"] == "complete"


async def test_a_format_that_the_engine_refuses_is_the_clients_error(served: Served) -> None:
    class Refusing:
        def __aiter__(self) -> Refusing:
            return self

        async def __anext__(self) -> Any:
            raise EngineRefused("engine e answered 400: no such type", 400)

        async def aclose(self) -> None:
            pass

    served.fleet.generate = lambda **_: Refusing()  # type: ignore[method-assign, assignment]
    session = await served.open()
    status, headers, body = await served.post(session, {"messages": ASK, "response_format": NESTED})
    assert (status, headers["x-should-retry"]) == (400, "false")
    assert "no such type" in body["error"]["message"]


@pytest.mark.parametrize(
    ("path", "extra", "said"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "schema"),
        (CHAT, {"response_format": {"type": "yaml"}}, "yaml"),
        (CHAT, {"response_format": "json"}, "object"),
        (RESPONSES, {"text": "json"}, "object"),
        (MESSAGES, {"output_config": "json"}, "object"),
        (CHAT, {"tools": [CALCULATOR], "tool_choice": "always"}, "always"),
        (CHAT, {"tools": [CALCULATOR], "tool_choice": {"type": "custom"}}, "custom"),
        (
            CHAT,
            {"tools": [CALCULATOR], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "calculator",
        ),
        (MESSAGES, {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool"}}, "name a tool"),
        (MESSAGES, {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "must"}}, "must"),
    ],
)
async def test_what_cannot_be_read_is_refused(
    served: Served, path: str, extra: dict[str, Any], said: str
) -> None:
    session = await served.open()
    status, _, body = await served.post(session, {**TALK[path], **extra}, path=path)
    assert status == 400
    assert said in body["error"]["message"]


async def test_parts_of_a_field_that_have_no_effect_are_named(served: Served) -> None:
    _, headers = await ask(served, RESPONSES, {"text": {"format": FLAT, "verbosity": "low"}})
    assert headers["x-areal-ignored"] == "text.verbosity"
    _, headers = await ask(served, MESSAGES, {"output_config": {"effort": "low"}})
    assert headers["x-areal-ignored"] == "output_config.effort"


# -- the grammars, by the library that runs them inside the engine ----------------------------------------

CALL = tool_call()
TWO = f"{CALL}\n{tool_call(arguments='{}')}"
ANSWER = '{"sum": 5}'
THOUGHT = "<think>\nhm\n</think>\n\n"
TOOLS = Constraint(("f",), None, ("calculator",))
ONE = Constraint(("f",), None, ("calculator",), parallel=False)
FORMAT = Constraint(("f",), SCHEMA)


@pytest.mark.parametrize(
    ("constraint", "offered", "accepted", "rejected"),
    [
        (TOOLS, True, [CALL, TWO], [ANSWER, "five", f"So: {CALL}", tool_call(name="other")]),
        (ONE, True, [CALL], [TWO, ANSWER]),
        (FORMAT, True, [ANSWER, CALL, TWO], ["five", '{"sum": "5"}', f"{ANSWER}{CALL}"]),
        (FORMAT, False, [ANSWER], ["five", CALL]),
    ],
)
@pytest.mark.parametrize("thinks", [False, True])
def test_the_grammar_allows_what_was_asked_for_and_nothing_else(
    model_folder: Path,
    constraint: Constraint,
    offered: bool,
    accepted: list[str],
    rejected: list[str],
    thinks: bool,
) -> None:
    hf = PreTrainedTokenizerFast.from_pretrained(str(model_folder))
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo.from_huggingface(hf, vocab_size=len(hf)), max_threads=1
    )
    syntax = Tokens.load(model_folder, GatewayConfig(enable_thinking=thinks)).syntax
    said = constraint.structured_outputs([CALCULATOR] if offered else [], syntax)
    assert said is not None
    if "json" in said:
        grammar = compiler.compile_json_schema(json.dumps(said["json"]))
    else:
        xgrammar.Grammar.from_structural_tag(said["structural_tag"])  # as vLLM checks it, without a tokenizer
        grammar = compiler.compile_structural_tag(said["structural_tag"])
    before = THOUGHT if thinks else ""

    def allowed(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar)
        ids = hf.encode(text, add_special_tokens=False)
        return all(matcher.accept_token(t) for t in [*ids, hf.eos_token_id])

    assert [t for t in accepted if not allowed(before + t)] == []
    assert [t for t in rejected if allowed(before + t)] == []
    assert not thinks or not any(allowed(t) for t in accepted)


def test_nothing_is_said_of_a_syntax_that_is_not_known() -> None:
    assert FORMAT.structured_outputs([], ReplySyntax()) is None
    assert FORMAT.structured_outputs([CALCULATOR], ReplySyntax(known=True)) is None
    assert TOOLS.structured_outputs([CALCULATOR], ReplySyntax(known=True)) is None


@pytest.mark.parametrize(
    ("syntax", "tools"),
    [
        (ReplySyntax(known=True, thinks=True, ids={"<tool_call>": 1, "</tool_call>": 2}), []),
        (ReplySyntax(known=True, json_calls=True, ids={"<tool_call>": 1}), [CALCULATOR]),
    ],
)
def test_a_grammar_is_not_said_with_markup_that_is_no_token(syntax: ReplySyntax, tools: Any) -> None:
    """A chat template may have a thinking switch and write `<think>` in ordinary tokens."""
    assert Constraint(("response_format",), schema=SCHEMA).structured_outputs(tools, syntax) is None
