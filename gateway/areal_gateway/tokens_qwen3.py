"""Qwen3's tokens, without looking at every token of a long conversation for each reply.

Invariant: the same results as `Tokens` gives, id for id and word for word.

The renderer scans prompt and reply in Python, several times over, for the marks of a reasoning region. Where
there is none, what it says depends on the ends alone, and those are what it is given: how the prompt's last
turn begins, how the reply ends, what its tool calls say. What it puts around tool results, and around a first
question to the same system prompt and tools, is asked of it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
from renderers import ParsedResponse

from areal_gateway.repeated_texts import RepeatedTexts
from areal_gateway.tokens import Tokens

MOST_RESULTS = 8
"""Tool results that are put into a frame that is kept; a turn with more is left to the renderer."""


class Qwen3Tokens(Tokens):
    """Made by Tokens.load; needs `syntax.ids`."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._frames: dict[tuple[int, int], list[list[int]]] = {}
        """What stands around tool results, by the token that ended the reply before and how many there are."""
        self._blank = RepeatedTexts(lambda opening, _: self._first(*orjson.loads(opening)))
        """First turns with nothing asked, by what comes before."""
        self._asked = self.tokenizer.encode(_asked(""))
        self._after = len(self._first(None, [])) - 1 - len(self._asked)
        """Ids that follow a first question, up to the reply."""

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """See Tokens.render."""
        if [m.get("role") for m in messages] not in (["user"], ["system", "user"]):
            return super().render(messages, tools)
        question, system = messages[-1].get("content"), None
        if len(messages) > 1 and not isinstance(system := messages[0].get("content"), str):
            return super().render(messages, tools)
        if not isinstance(question, str):
            return super().render(messages, tools)
        blank = self._blank.encode(orjson.dumps([system, tools]).decode(), False)
        begin, end = len(blank) - self._after - len(self._asked), len(blank) - self._after
        if blank[begin:end] != self._asked:  # not what it is taken for
            return super().render(messages, tools)
        return blank[:begin] + self.tokenizer.encode(_asked(question)) + blank[end:]

    def _first(self, system: str | None, tools: list[dict[str, Any]]) -> list[int]:
        """A first turn in which nothing is asked."""
        messages = [] if system is None else [{"role": "system", "content": system}]
        return super().render([*messages, {"role": "user", "content": ""}], tools)

    def bridge(
        self,
        conversation: list[dict[str, Any]],
        prompt_ids: Sequence[int],
        output_ids: list[int],
        new_messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
    ) -> list[int] | None:
        """See Tokens.bridge."""
        turn = self._turn(prompt_ids)
        one_turn = not any(t in output_ids[:-1] for t in self.stop_token_ids)
        if not (output_ids and one_turn and self._without_reasoning(turn, output_ids)):
            return super().bridge(conversation, prompt_ids, output_ids, new_messages, tools)
        texts = _tool_results(new_messages)
        if not texts or output_ids[-1] not in self.stop_token_ids:
            return super().bridge(conversation, turn, output_ids[-1:], new_messages, tools)
        frame = self._frames.get((output_ids[-1], len(texts)))
        if frame is None:
            blank = [{"role": "tool", "content": ""} for _ in texts]
            shown = super().bridge(conversation, turn, output_ids[-1:], blank, tools)
            frame = None if shown is None else self._frame(shown, len(texts))
            if frame is None:  # not this time
                return super().bridge(conversation, turn, output_ids[-1:], new_messages, tools)
            self._frames[output_ids[-1], len(texts)] = frame
        new = list(frame[0])
        for text, after in zip(texts, frame[1:], strict=True):
            new += self.tokenizer.encode(_framed(text))
            new += after
        return new

    def _frame(self, blank: list[int], n: int) -> list[list[int]] | None:
        """What the renderer puts before, between and after the texts of `n` tool results, from its ids for empty
        ones; None where it is not what it is taken for."""
        begin, end = self.tokenizer.convert_tokens_to_ids(["<tool_response>", "</tool_response>"])
        pieces, at = [], 0
        for start in [i + 1 for i, t in enumerate(blank) if t == begin]:
            pieces.append(blank[at:start])
            at = blank.index(end, start)
            if blank[start:at] != self.tokenizer.encode(_framed("")):
                return None
        return [*pieces, blank[at:]] if len(pieces) == n else None

    def parse(
        self, output_ids: list[int], prompt_ids: Sequence[int], tools: list[dict[str, Any]]
    ) -> ParsedResponse:
        """See Tokens.parse."""
        if not self._without_reasoning(self._turn(prompt_ids), output_ids):
            return super().parse(output_ids, prompt_ids, tools)
        body, call = self.body(output_ids), self.syntax.ids["<tool_call>"]
        at = body.index(call) if call in body else len(body)
        if at == len(body):
            return ParsedResponse(content=self.text(body).strip())
        parsed = super().parse(body[at:], [], tools)
        if not parsed.tool_calls:  # no parser could read them
            return super().parse(output_ids, prompt_ids, tools)
        for i, said in enumerate(parsed.tool_calls):
            if said.token_span is not None:
                start, end = said.token_span
                parsed.tool_calls[i] = replace(said, token_span=(at + start, at + end))
        parsed.content = self.text(body[:at]).strip()
        return parsed

    def _turn(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt from the end of its last whole turn on; all of it where no turn ended."""
        for i in range(len(prompt_ids) - 1, -1, -1):
            if prompt_ids[i] in self.stop_token_ids:
                return list(prompt_ids[i:])
        return list(prompt_ids)

    def _without_reasoning(self, turn: list[int], output_ids: list[int]) -> bool:
        """Whether neither the prompt's last turn leaves a reasoning region open nor the reply has a mark of one."""
        begin, end = self.syntax.ids["<think>"], self.syntax.ids["</think>"]
        if begin in output_ids or end in output_ids:
            return False
        last = next((i for i in range(len(turn) - 1, -1, -1) if turn[i] == begin), None)
        return last is None or end in turn[last:]  # any that began before has ended with it, at the latest


def _tool_results(messages: list[dict[str, Any]]) -> list[str]:
    """The texts, where the messages are nothing else and not many; what agents mostly go on with."""
    texts = [text for m in messages if m["role"] == "tool" and isinstance(text := m.get("content"), str)]
    return texts if len(texts) == len(messages) <= MOST_RESULTS else []


def _asked(text: str) -> str:
    """As the renderer tokenises what a user says: one text with the role before it."""
    return f"user\n{text}"


def _framed(text: str) -> str:
    """As the renderer tokenises a tool's result: one text with the line breaks around it."""
    return f"\n{text}\n"
