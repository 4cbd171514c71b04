"""The two kinds of traffic: conversations that grow turn by turn, and fresh prompts, at a chosen size.

Sizes are prompt tokens x reply tokens of Qwen3's tokenizer, exact to a few tokens. A conversation has tools; every
reply of the canned engine says something and calls the tool, and its last turn has the prompt of the size.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, field
from typing import Any

from areal_gateway.tokens import Tokens

TOOL_RESULT = 24
"""Least tokens that the tool's result and the template around it add to a turn."""
WORDS = [
    "the",
    "agent",
    "asks",
    "a",
    "tool",
    "for",
    "numbers",
    "and",
    "the",
    "model",
    "reads",
    "them",
    "again",
    "before",
    "it",
    "says",
    "what",
    "it",
    "found",
    "in",
    "every",
    "table",
    "of",
    "this",
    "long",
    "report",
    "about",
    "rivers",
    "prices",
    "engines",
    "weather",
    "letters",
    "and",
    "other",
    "plain",
    "things",
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a thing up.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
        },
    }
]
SYSTEM = {"role": "system", "content": "Use the tool."}


@dataclass(frozen=True)
class Size:
    """Prompt and reply, in tokens."""

    prompt: int
    reply: int

    def __str__(self) -> str:
        return f"{self.prompt}x{self.reply}"


@dataclass
class Plan:
    """Everything both kinds of traffic need at one size.

    Attributes:
        spec: what the canned engine answers.
        reply: the assistant message as an agent puts it back.
        turns: turns of a conversation; the last has a prompt of `size.prompt` tokens.
        result_words: words in a tool result, so that it has.
        fresh_words: words of a fresh prompt.
        prompts: an example's prompt ids at the last turn, for the bare engine.
    """

    size: Size
    spec: dict[str, Any]
    reply: dict[str, Any]
    turns: int
    result_words: int
    fresh_words: int
    ids: list[int] = field(default_factory=list)

    def fresh(self, seed: int) -> list[dict[str, Any]]:
        return [SYSTEM, {"role": "user", "content": text(self.fresh_words, seed)}]

    def opening(self, seed: int) -> list[dict[str, Any]]:
        return [SYSTEM, {"role": "user", "content": text(6, seed)}]

    def answered(self, seed: int) -> list[dict[str, Any]]:
        """What a turn adds: the reply, as the agent puts it back, and the tool's result."""
        call = self.reply["tool_calls"][0]["id"]
        return [self.reply, {"role": "tool", "tool_call_id": call, "content": text(self.result_words, seed)}]


def text(words: int, seed: int) -> str:
    r = random.Random(seed)
    return " ".join(r.choices(WORDS, k=words))


def plan(tokens: Tokens, tokenizer_json: str, size: Size) -> Plan:
    """Fit words to tokens: counted with the gateway's own rendering."""
    content, ids = _reply(tokens, size.reply)
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": "lookup", "arguments": '{"q": "rivers"}'},
    }
    spec = {"tokenizer": tokenizer_json, "reply_ids": ids, "content": content, "tool_calls": [call]}
    reply = {"role": "assistant", "content": content, "tool_calls": [call]}
    p = Plan(size, spec, reply, 2, 0, 0)
    opening = len(tokens.render(p.opening(0), TOOLS))
    p.turns = max(2, 1 + (size.prompt - opening) // (size.reply + TOOL_RESULT))
    p.result_words = _fit(lambda n: _last_prompt(tokens, p, n), size.prompt)
    p.fresh_words = _fit(
        lambda n: len(tokens.render([SYSTEM, {"role": "user", "content": text(n, 0)}], TOOLS)), size.prompt
    )
    p.ids = tokens.render(p.fresh(0), TOOLS)
    return p


def _reply(tokens: Tokens, n: int) -> tuple[str, list[int]]:
    """(content, ids): exactly n tokens, that end in a tool call and the end of the turn."""
    call = '\n<tool_call>\n{"name": "lookup", "arguments": {"q": "rivers"}}\n</tool_call><|im_end|>'
    for words in itertools.count(1):
        content = text(words, 1)
        ids = tokens.tokenizer.encode(content + call)
        if len(ids) >= n:
            return content, ids
    raise AssertionError("unreachable")


def _last_prompt(tokens: Tokens, p: Plan, result_words: int) -> int:
    messages = p.opening(0)
    for turn in range(p.turns - 1):
        result = {"role": "tool", "tool_call_id": "call_0", "content": text(result_words, turn)}
        messages += [p.reply, result]
    return len(tokens.render(messages, TOOLS))


def _fit(count: Any, target: int) -> int:
    """Largest n with count(n) <= target (at least 1)."""
    low, high = 1, 2
    while count(high) <= target:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) <= target else (low, middle)
    return low


def body(messages: list[dict[str, Any]], stream: bool) -> bytes:
    """A chat request as an SDK sends it."""
    value: dict[str, Any] = {"model": "policy", "messages": messages, "tools": TOOLS, "stream": stream}
    return json.dumps(value).encode()
