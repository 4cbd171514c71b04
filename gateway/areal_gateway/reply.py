"""From sampled ids to the assistant message an agent sees, whole or as it grows.

Invariant: the deltas of a stream, joined, are the message that the whole reply gives. Text is only sent
once no later token can change it; a tool call is sent whole, and only at the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from renderers import ParsedResponse, ToolCallParseStatus

from areal_gateway.tokens import Tokens

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply: text or reasoning, or one whole tool call at position `index`."""

    content: str = ""
    reasoning: str = ""
    tool_call: dict[str, Any] | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How one request wants its replies read.

    `parse_tools` False: the model was offered no tools, or told to use none; what looks like a tool call
    is then text. `stop` strings end the text and are not part of it. `plain`: the reply continues a raw
    prompt; its text is given as it was sampled, white space and markup included.
    """

    tools: list[dict[str, Any]]
    parse_tools: bool
    stop: Sequence[str]
    plain: bool = False


def read_reply(
    tokens: Tokens, fmt: ReplyFormat, prompt_ids: Sequence[int], output_ids: list[int], call_id: str
) -> Message:
    """The assistant message of a whole reply, in the shape of a chat completion's `message`."""
    if fmt.plain:
        return {"role": "assistant", "content": _cut(tokens.text(tokens.body(output_ids)), fmt.stop)}
    parsed = tokens.parse(output_ids, prompt_ids, fmt.tools)
    content = _final_content(tokens, fmt, parsed, output_ids)
    calls = _tool_calls(parsed, call_id) if fmt.parse_tools else []
    message: Message = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning := (parsed.reasoning_content or "").strip():
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def stopped_by(tokens: Tokens, output_ids: Sequence[int], stops: Sequence[str]) -> str | None:
    """The stop string that a reply runs into first, or None."""
    if not stops:
        return None
    text = tokens.text(tokens.body(list(output_ids)))
    found = [(at, s) for s in stops if (at := text.find(s)) != -1]
    return min(found)[1] if found else None


def deltas_of(message: Message) -> list[Delta]:
    """A whole message as deltas, for a reply that is replayed."""
    out = []
    if message.get("reasoning_content"):
        out.append(Delta(reasoning=message["reasoning_content"]))
    if message.get("content"):
        out.append(Delta(content=message["content"]))
    out.extend(Delta(tool_call=c, index=i) for i, c in enumerate(message.get("tool_calls") or []))
    return out


class ReplyStream:
    """Turns the growing ids of one reply into deltas.

    Each look parses all ids so far with the model's own parser, which is exact for every grammar but costs
    time in proportion to the reply. `pace` spreads the looks so that all streams together spend at most a
    fifth of the event loop on them.
    """

    def __init__(self, tokens: Tokens, fmt: ReplyFormat, prompt_ids: Sequence[int], pace: Pace) -> None:
        self._tokens = tokens
        self._format = fmt
        self._prompt_ids = prompt_ids
        self._pace = pace
        self._content = ""
        self._reasoning = ""
        self._next_look = 0.0
        self.told = 0
        """Tokens whose logprobs were sent already."""

    def feed(self, output_ids: list[int]) -> list[Delta]:
        """Deltas that the ids so far make certain; often none."""
        now = time.perf_counter()
        if now < self._next_look:
            return []
        out = self._plain(output_ids) if self._format.plain else self._parsed(output_ids)
        self._next_look = now + self._pace.interval(time.perf_counter() - now)
        return out

    def _plain(self, output_ids: list[int]) -> list[Delta]:
        text = self._tokens.text(self._tokens.body(output_ids)).rstrip("�")
        if (more := self._grown(self._content, self._before_stop(text))) is None:
            return []
        self._content += more
        return [Delta(content=more)]

    def _parsed(self, output_ids: list[int]) -> list[Delta]:
        parsed = self._tokens.parse(output_ids, self._prompt_ids, self._format.tools)
        out = []
        if (
            more := self._grown(self._reasoning, _certain((parsed.reasoning_content or "").lstrip()))
        ) is not None:
            self._reasoning += more
            out.append(Delta(reasoning=more))
        if not self._format.parse_tools and parsed.tool_calls:
            text = ""  # markup that will be text, but only once it is whole
        else:
            text = self._before_stop(_certain(parsed.content.lstrip()))
        if (more := self._grown(self._content, text)) is not None:
            self._content += more
            out.append(Delta(content=more))
        return out

    def finish(self, message: Message) -> list[Delta]:
        """What of the whole message was not sent yet. Raises ValueError if what was sent is no part of it."""
        out = []
        reasoning, content = message.get("reasoning_content") or "", message.get("content") or ""
        for sent, whole in ((self._reasoning, reasoning), (self._content, content)):
            if not whole.startswith(sent):
                raise ValueError(f"a stream already sent {sent[-40:]!r}, which the whole reply does not say")
        if more := reasoning[len(self._reasoning) :]:
            out.append(Delta(reasoning=more))
        if more := content[len(self._content) :]:
            out.append(Delta(content=more))
        out.extend(Delta(tool_call=c, index=i) for i, c in enumerate(message.get("tool_calls") or []))
        return out

    @staticmethod
    def _grown(sent: str, text: str) -> str | None:
        return text[len(sent) :] if len(text) > len(sent) and text.startswith(sent) else None

    def _before_stop(self, text: str) -> str:
        """Text up to a stop string, without an ending that could become one."""
        text = _cut(text, self._format.stop)
        for stop in self._format.stop:
            for n in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:n]):
                    text = text[:-n]
                    break
        return text


class Pace:
    """How often the streams of one gateway may look at their ids: a fifth of the loop for all of them."""

    SHARE = 0.2

    def __init__(self) -> None:
        self.streams = 0

    def interval(self, cost_s: float) -> float:
        return cost_s * max(1, self.streams) / self.SHARE


def _certain(text: str) -> str:
    """Without an ending that more tokens may change: white space (a parser strips it) or half a character."""
    return text.rstrip("�").rstrip()


def _cut(text: str, stops: Sequence[str]) -> str:
    ends = [i for s in stops if s and (i := text.find(s)) != -1]
    return text[: min(ends)] if ends else text


def _final_content(tokens: Tokens, fmt: ReplyFormat, parsed: ParsedResponse, output_ids: list[int]) -> str:
    """The reply's text; tool-call markup that could not be read, or was not asked for, stays visible."""
    body = tokens.body(output_ids)
    shown = [c for c in parsed.tool_calls if not (fmt.parse_tools and c.status is ToolCallParseStatus.OK)]
    pieces = [parsed.content.strip()]
    for call in shown:
        pieces.append(tokens.text(body[slice(*call.token_span)]) if call.token_span else call.raw)
    return _cut("\n".join(p for p in pieces if p), fmt.stop)


def _tool_calls(parsed: ParsedResponse, call_id: str) -> list[dict[str, Any]]:
    good = [c for c in parsed.tool_calls if c.status is ToolCallParseStatus.OK]
    return [
        {
            "id": call.id or f"call_{call_id}_{i}",
            "type": "function",
            "function": {"name": call.name or "", "arguments": _arguments_text(call.arguments)},
        }
        for i, call in enumerate(good)
    ]


def _arguments_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)
