"""Transcripts for the warm start, rendered by the very renderer that will serve the model.

Invariant: the ids before each reply are the prompt that the gateway would send, token for token, and the
loss falls on the reply's tokens only, its end-of-turn included.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from calculator import TOOL, calculate
from renderers import Qwen3RendererConfig, create_renderer
from transformers.utils.chat_template_utils import render_jinja_template

from small_model.questions import OPERATIONS, Question, questions
from small_model.tokenizer import CHAT_TEMPLATE

Kind = Literal["right", "guess", "wrong_operator"]


def _as_langchain(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    parameters = {key: function["parameters"][key] for key in ("properties", "required", "type")}
    return {**tool, "function": {**function, "parameters": parameters}}


TOOL_FORMS: tuple[dict[str, Any], ...] = (TOOL, _as_langchain(TOOL))
"""The one tool as the agent writes it for the `openai` SDK, and as LangChain's `bind_tools` writes it: the
same schema with its keys in another order, hence other tokens. The model is taught both."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """One conversation of L tokens: `token_ids` [L] and `loss_mask` [L], true on what the model said."""

    token_ids: list[int]
    loss_mask: list[bool]


def conversation(question: Question, kind: Kind, rng: random.Random) -> list[dict[str, Any]]:
    """Messages of one run of the agent that went well (`right`) or in one of two bad ways."""
    user = {"role": "user", "content": question.text}
    if kind == "guess":
        wrong = question.answer + rng.choice((-1, 1)) * rng.randint(1, max(9, abs(question.answer) // 3))
        # Worded apart from an answer, so that inventing a number does not unlearn repeating the tool's.
        return [user, {"role": "assistant", "content": f"I guess {wrong}."}]
    op = question.op if kind == "right" else rng.choice([o for o in OPERATIONS if o != question.op])
    expression = f"{question.a}{op}{question.b}"
    arguments, result = json.dumps({"expression": expression}), calculate(expression)
    call = {"id": "call", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return [
        user,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call", "content": result},
        {"role": "assistant", "content": f"The answer is {result}."},
    ]


class Renderer:
    """Messages -> prompts and transcripts, with the renderer the gateway uses for Qwen3, thinking off.

    The tools' preamble is the same for every conversation, so it is rendered once per tool form; a special
    token ends it, hence nothing merges across the seam and the ids are those of a whole rendering.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._renderer: Any = create_renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False))
        self.stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._preambles = [self._preamble(tool) for tool in TOOL_FORMS]
        user = [{"role": "user", "content": ""}]
        asked = self._renderer.render_ids(user, add_generation_prompt=True)
        self._opening = asked[len(self._renderer.render_ids(user)) :]

    def _preamble(self, tool: dict[str, Any]) -> list[int]:
        user = [{"role": "user", "content": ""}]
        whole, bare = self._renderer.render_ids(user, tools=[tool]), self._renderer.render_ids(user)
        return whole[: len(whole) - len(bare)]

    def prompt(self, messages: list[dict[str, Any]], form: int = 0) -> list[int]:
        """The ids the gateway sends for a call with `TOOL_FORMS[form]`."""
        return self._preambles[form] + self._renderer.render_ids(messages, add_generation_prompt=True)

    def parse(self, reply_ids: list[int]) -> tuple[str, str | None]:
        """A reply -> its text, and the expression of its first well-formed tool call."""
        parsed = self._renderer.parse_response(reply_ids)
        for call in parsed.tool_calls or ():
            if call.status.value == "ok" and isinstance(call.arguments, dict):
                expression = call.arguments.get("expression")
                return parsed.content or "", expression if isinstance(expression, str) else None
        return parsed.content or "", None

    def transcript(self, messages: list[dict[str, Any]], form: int = 0) -> Transcript:
        """A finished conversation -> ids and mask: a reply runs from its generation prompt to its end."""
        ids = self._renderer.render_ids(messages)
        opening, mask, said = self._opening, [], False
        for i, token in enumerate(ids):
            mask.append(said)
            if said:
                said = token != self.stop
            elif ids[i + 1 - len(opening) : i + 1] == opening:
                said = True
        end = len(ids) - ids[::-1].index(self.stop)  # the newline after it is the template's
        preamble = self._preambles[form]
        return Transcript(preamble + ids[:end], [False] * len(preamble) + mask[:end])


def transcripts(
    renderer: Renderer, source: Iterator[Question], mix: Mapping[Kind, float], seed: int
) -> Iterator[Transcript]:
    """Endless transcripts; `mix` gives the share of each kind, tool forms alternate at random."""
    rng = random.Random(seed)
    kinds: Sequence[Kind] = tuple(mix)
    weights = tuple(mix.values())
    for question in source:
        kind = rng.choices(kinds, weights)[0]
        yield renderer.transcript(conversation(question, kind, rng), rng.randrange(len(TOOL_FORMS)))


def tokenizer_texts(seed: int, count: int = 1500) -> list[str]:
    """Conversations as text, of every kind and tool form, for the tokenizer to be trained on."""
    rng = random.Random(seed)
    kinds: Sequence[Kind] = ("right", "guess", "wrong_operator")
    texts = []
    for _, question in zip(range(count), questions("warm", seed), strict=False):
        messages = conversation(question, rng.choice(kinds), rng)
        (text,), _ = render_jinja_template(
            [messages], tools=[rng.choice(TOOL_FORMS)], chat_template=CHAT_TEMPLATE
        )
        texts.append(text)
    return texts
