"""The events of one streamed response, in the order that OpenAI's SDKs expect.

response.created, response.in_progress; for each item output_item.added, its part's added, deltas and done,
output_item.done; then response.completed, or response.incomplete where the token limit ended the reply.

Invariant: one item is open at a time, and its deltas, joined, are what its `done` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from areal_agent.errors import GatewayError
from areal_gateway.dialects.base import Served
from areal_gateway.dialects.openai_shapes import KEEP_ALIVE, error_object, token_logprobs
from areal_gateway.dialects.responses_items import (
    Item,
    call_item,
    message_item,
    reasoning_item,
    reasoning_part,
    text_part,
)
from areal_gateway.exchange import CallRequest, Exchange, Said, Told
from areal_gateway.records import CallRecord

Document = dict[str, Any]

_TEXT = "response.output_text"
_REASONING = "response.reasoning_text"


@dataclass
class _Open:
    """The item that grows: by deltas of which kind, its place, its text and logprobs so far."""

    kind: str
    item_id: str
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)


class ResponseStream:
    """`begun` is the response before anything was said, `finished` the whole one of a record."""

    def __init__(
        self,
        served: Served,
        request: CallRequest,
        exchange: Exchange,
        *,
        begun: Document,
        finished: Callable[[CallRecord], Document],
    ) -> None:
        self._served = served
        self._request = request
        self._id = exchange.exchange_id
        self._begun = begun
        self._finished = finished
        self._sequence = 0
        self._index = -1
        """Of the item that was last added."""
        self._open: _Open | None = None
        self._answered = False
        """A message or a function call was sent."""
        self._pairs: list[Told] = []
        """Logprobs that no event has told yet."""

    def said(self, said: Said) -> bytes:
        out = self._begin()
        self._pairs += said.logprobs
        if said.record is not None:
            return out + (b"" if self._answered else self._text("")) + self._close()
        if (delta := said.delta) is None:
            return out
        if delta.reasoning:
            out += self._grow(_REASONING, delta.reasoning, {})
        if delta.content:
            out += self._text(delta.content)
        if delta.tool_call is not None:
            out += self._close() + self._call(call_item(self._id, delta.index, delta.tool_call))
        return out

    def failed(self, error: GatewayError) -> bytes:
        """The failed response for who reads events, then an error for who does not: OpenAI's SDK raises it."""
        shape = error_object(error, "input")
        failure = {"code": "server_error", "message": str(error)}
        out = self._begin()
        out += self._event("response.failed", response={**self._begun, "status": "failed", "error": failure})
        return out + self._event(
            "error", code=shape["code"], message=shape["message"], param=shape["param"], error=shape
        )

    def idle(self) -> bytes:
        return KEEP_ALIVE

    def done(self, records: list[CallRecord]) -> bytes:
        whole = self._finished(records[0])
        return self._begin() + self._event(f"response.{whole['status']}", response=whole)

    def _begin(self) -> bytes:
        if self._sequence:
            return b""
        out = self._event("response.created", response=self._begun)
        return out + self._event("response.in_progress", response=self._begun)

    def _text(self, text: str) -> bytes:
        self._answered = True
        logprobs = self._take_logprobs()
        out = self._grow(_TEXT, text, {"logprobs": logprobs})
        if self._open is not None:
            self._open.logprobs += logprobs
        return out

    def _take_logprobs(self) -> list[Any]:
        pairs, self._pairs = self._pairs, []
        return token_logprobs(self._served, pairs) if self._request.logprobs else []

    def _grow(self, kind: str, delta: str, extra: dict[str, Any]) -> bytes:
        out = b""
        if self._open is None or self._open.kind != kind:
            out = self._close()
            item, part = self._empty(kind)
            self._open = _Open(kind, item["id"])
            out += self._add(item)
            out += self._event("response.content_part.added", part=part, **self._place())
        opened = self._open
        if opened is not None and delta:
            opened.text += delta
            out += self._event(f"{kind}.delta", delta=delta, **extra, **self._place())
        return out

    def _empty(self, kind: str) -> tuple[Item, dict[str, Any]]:
        item = message_item(self._id, "", None) if kind == _TEXT else reasoning_item(self._id, "")
        part = text_part("", None) if kind == _TEXT else reasoning_part("")
        return {**item, "status": "in_progress", "content": []}, part

    def _close(self) -> bytes:
        if (opened := self._open) is None:
            return b""
        extra = {}
        if opened.kind == _TEXT:
            opened.logprobs += self._take_logprobs()
            extra = {"logprobs": opened.logprobs}
            item, part = (
                message_item(self._id, opened.text, opened.logprobs),
                text_part(opened.text, opened.logprobs),
            )
        else:
            item, part = reasoning_item(self._id, opened.text), reasoning_part(opened.text)
        out = self._event(f"{opened.kind}.done", text=opened.text, **extra, **self._place())
        out += self._event("response.content_part.done", part=part, **self._place())
        self._open = None
        return out + self._event("response.output_item.done", output_index=self._index, item=item)

    def _call(self, item: Item) -> bytes:
        self._answered = True
        out = self._add({**item, "arguments": "", "status": "in_progress"})
        place = {"item_id": item["id"], "output_index": self._index}
        name = "response.function_call_arguments"
        out += self._event(f"{name}.delta", delta=item["arguments"], **place)
        out += self._event(f"{name}.done", arguments=item["arguments"], name=item["name"], **place)
        return out + self._event("response.output_item.done", output_index=self._index, item=item)

    def _add(self, item: Item) -> bytes:
        self._index += 1
        return self._event("response.output_item.added", output_index=self._index, item=item)

    def _place(self) -> dict[str, Any]:
        item_id = self._open.item_id if self._open else None
        return {"item_id": item_id, "output_index": self._index, "content_index": 0}

    def _event(self, name: str, /, **value: Any) -> bytes:
        data = orjson.dumps({"type": name, "sequence_number": self._sequence, **value})
        self._sequence += 1
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
