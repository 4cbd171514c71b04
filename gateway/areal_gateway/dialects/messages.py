"""Anthropic's Messages API: POST /v1/messages, streamed and not, and POST /v1/messages/count_tokens.

Invariant: a reply is at most one thinking block, then text, then its tool_use blocks; a stream's blocks,
accumulated, are the blocks of the same reply sent whole.
"""

from __future__ import annotations

from typing import Any

import orjson

from areal_agent.errors import GatewayError
from areal_gateway.dialects.base import Past, Served, usage_of
from areal_gateway.dialects.constraints import anthropic_choice, constraint, openai_format
from areal_gateway.dialects.fields import parts_without_effect, treat
from areal_gateway.dialects.messages_fields import FIELDS, PROMPT_FIELDS
from areal_gateway.dialects.messages_reading import read_conversation, read_tools, tool_input
from areal_gateway.dialects.reading import an_object, bad, flag, integer, kind, labels, model_name, stops
from areal_gateway.exchange import CallRequest, ContextLengthError, Exchange, Said
from areal_gateway.records import CallRecord
from areal_gateway.reply import stopped_by

THINKING = "thinking"
"""Note of a request: its client asked to be shown the thinking, and knows such blocks."""

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class Messages:
    name = "messages"
    path = "/v1/messages"
    fields = FIELDS

    def read(self, body: Any, past: Past) -> CallRequest:
        body = an_object(body)
        if body.get("max_tokens") is None:
            raise bad("max_tokens: Field required")
        return _request(
            body,
            ignored=(*treat(FIELDS, body), *parts_without_effect(body, "output_config", "format")),
            max_tokens=integer(body["max_tokens"], "max_tokens", 1, 2**31 - 1),
            stop=stops(body.get("stop_sequences"), "stop_sequences"),
            stream=flag(body, "stream"),
            labels=labels(body.get("metadata")),
        )

    def reply(self, served: Served, request: CallRequest, exchange: Exchange) -> bytes:
        record = exchange.records[0]
        return orjson.dumps(
            {
                **_head(served, request, exchange),
                "content": _content(request, exchange, record),
                **_ending(served, request, record),
                "usage": _usage(exchange.records),
            }
        )

    def stream(self, served: Served, request: CallRequest, exchange: Exchange) -> MessageStream:
        return MessageStream(served, request, exchange)

    def error(self, error: GatewayError) -> bytes:
        return orjson.dumps(_error(error))


class CountTokens:
    """How many tokens a request's prompt would have: those of the very prompt that asking would make."""

    path = "/v1/messages/count_tokens"
    fields = PROMPT_FIELDS

    def read(self, body: Any, past: Past) -> CallRequest:
        body = an_object(body)
        return _request(body, ignored=treat(PROMPT_FIELDS, body))

    def reply(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})

    def error(self, error: GatewayError) -> bytes:
        return orjson.dumps(_error(error))


class MessageStream:
    """message_start, then each block's start, deltas and stop, then message_delta with the end, message_stop."""

    def __init__(self, served: Served, request: CallRequest, exchange: Exchange) -> None:
        self._served = served
        self._request = request
        self._exchange = exchange
        self._started = False
        self._index = -1
        self._open = ""
        """Type of the block that is open, if one is."""
        self._answered = False
        """A text or a tool_use was sent."""

    def said(self, said: Said) -> bytes:
        out = self._start()
        if said.record is not None:
            return out + (self._close() if self._answered else self._text("") + self._close())
        if (delta := said.delta) is None:
            return out
        if delta.reasoning and self._request.notes.get(THINKING):
            out += self._block(THINKING, _thinking("", ""))
            out += self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            out += self._text(delta.content)
        if delta.tool_call is not None:
            use = _tool_use(delta.tool_call)
            written = orjson.dumps(use["input"]).decode()
            out += self._close() + self._block("tool_use", {**use, "input": {}})
            out += self._delta({"type": "input_json_delta", "partial_json": written}) + self._close()
            self._answered = True
        return out

    def failed(self, error: GatewayError) -> bytes:
        return _event(_error(error))

    def idle(self) -> bytes:
        """Clients expect message_start first, so a ping may be what begins the stream."""
        return self._start() + _event({"type": "ping"})

    def done(self, records: list[CallRecord]) -> bytes:
        delta = _ending(self._served, self._request, records[0])
        end = {"type": "message_delta", "delta": delta, "usage": _usage(records)}
        return self._start() + _event(end) + _event({"type": "message_stop"})

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        message = {
            **_head(self._served, self._request, self._exchange),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._exchange.prompt_tokens, "output_tokens": 0},
        }
        return _event({"type": "message_start", "message": message})

    def _text(self, text: str) -> bytes:
        self._answered = True
        out = self._block("text", {"type": "text", "text": ""})
        return out + (self._delta({"type": "text_delta", "text": text}) if text else b"")

    def _block(self, kind: str, block: dict[str, Any]) -> bytes:
        """Open a block of this type, unless it is the open one."""
        if self._open == kind:
            return b""
        out = self._close()
        self._open, self._index = kind, self._index + 1
        return out + _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        out = b""
        if self._open == THINKING:
            out = self._delta({"type": "signature_delta", "signature": self._exchange.exchange_id})
        self._open = ""
        return out + _event({"type": "content_block_stop", "index": self._index})


def _request(body: dict[str, Any], **fields: Any) -> CallRequest:
    tools = read_tools(body.get("tools"))
    choice = body.get("tool_choice")
    told_none = isinstance(choice, dict) and choice.get("type") == "none"
    thinking = body.get("thinking")
    config = body.get("output_config") or {}
    if not isinstance(config, dict):
        raise bad(f"output_config must be an object, not {kind(config)}")
    wanted = config.get("format") or body.get("output_format")
    shown = isinstance(thinking, dict) and thinking.get("type") not in (None, "disabled")
    return CallRequest(
        dialect=Messages.name,
        model=model_name(body),
        messages=read_conversation(body),
        tools=tools,
        parse_tools=bool(tools) and not told_none,
        constraint=constraint(
            tools,
            anthropic_choice(choice, tools),
            openai_format(wanted, "output_config.format", nested=False),
            parallel=not (isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True),
            fields=("tool_choice", "output_config" if config.get("format") else "output_format"),
        ),
        notes={THINKING: shown},
        **fields,
    )


def _head(served: Served, request: CallRequest, exchange: Exchange) -> dict[str, Any]:
    return {
        "id": f"msg_{exchange.exchange_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model or served.model,
    }


def _content(request: CallRequest, exchange: Exchange, record: CallRecord) -> list[dict[str, Any]]:
    """Never without text or tool_use: clients look at the last block, whatever the model said."""
    reply = record.reply or {}
    blocks: list[dict[str, Any]] = []
    if reply.get("reasoning_content") and request.notes.get(THINKING):
        blocks.append(_thinking(reply["reasoning_content"], exchange.exchange_id))
    calls = reply.get("tool_calls") or []
    if reply.get("content") or not calls:
        blocks.append({"type": "text", "text": reply.get("content") or ""})
    return blocks + [_tool_use(call) for call in calls]


def _thinking(text: str, signature: str) -> dict[str, Any]:
    """Some clients drop a thinking block whose signature is empty, so it has one; nobody checks it."""
    return {"type": THINKING, "thinking": text, "signature": signature}


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": tool_input(function["arguments"]),
    }


def _ending(served: Served, request: CallRequest, record: CallRecord) -> dict[str, Any]:
    sequence = stopped_by(served.tokens, record.output_ids, request.stop)
    reason = _STOP_REASONS.get(record.finish_reason or "", "stop_sequence" if sequence else "end_turn")
    return {"stop_reason": reason, "stop_sequence": sequence if reason == "stop_sequence" else None}


def _usage(records: list[CallRecord]) -> dict[str, int]:
    usage = usage_of(records)
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}


def _error(error: GatewayError) -> dict[str, Any]:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = str(error)
    if isinstance(error, ContextLengthError):  # in the words by which Anthropic's clients know to compact
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.context - 1} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


def _event(value: dict[str, Any]) -> bytes:
    return b"event: " + value["type"].encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"
