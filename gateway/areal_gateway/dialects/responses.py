"""OpenAI's Responses API: POST /v1/responses, streamed and not, and POST /v1/responses/input_tokens.

Invariant: a conversation continues the stored ids whichever way it is told, by items or by
`previous_response_id`; the response that ends a stream is the document of the same reply sent whole.
"""

from __future__ import annotations

from typing import Any

import orjson

from areal_agent.errors import GatewayError
from areal_gateway.dialects.base import Past, Served, usage_of
from areal_gateway.dialects.constraints import MAX_TOP_LOGPROBS, constraint, openai_choice, openai_format
from areal_gateway.dialects.fields import parts_without_effect, treat
from areal_gateway.dialects.openai_shapes import error_body, token_logprobs
from areal_gateway.dialects.reading import an_object, bad, flag, integer, kind, labels, model_name
from areal_gateway.dialects.responses_fields import FIELDS, PROMPT_FIELDS
from areal_gateway.dialects.responses_items import Item, output_items, read_conversation, read_tools
from areal_gateway.dialects.responses_stream import ResponseStream
from areal_gateway.exchange import CallRequest, Exchange
from areal_gateway.records import CallRecord

LOGPROBS = "message.output_text.logprobs"

_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}
"""What a response repeats of its request, and what it says where the request said nothing."""


class Responses:
    name = "responses"
    path = "/v1/responses"
    fields = FIELDS

    def read(self, body: Any, past: Past) -> CallRequest:
        body = an_object(body)
        include = body.get("include") or []
        if not isinstance(include, list):
            raise bad(f"include must be a list, not {kind(include)}")
        top_logprobs = integer(body.get("top_logprobs"), "top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
        unseen = ("top_logprobs",) if top_logprobs and LOGPROBS not in include else ()
        return _request(
            body,
            past,
            ignored=(*treat(FIELDS, body), *parts_without_effect(body, "text", "format"), *unseen),
            max_tokens=integer(body.get("max_output_tokens"), "max_output_tokens", 1, 2**31 - 1),
            stream=flag(body, "stream"),
            logprobs=LOGPROBS in include,
            top_logprobs=0 if unseen else top_logprobs,
            labels=labels(body.get("metadata")),
        )

    def reply(self, served: Served, request: CallRequest, exchange: Exchange) -> bytes:
        return orjson.dumps(finished(served, request, exchange, exchange.records[0]))

    def stream(self, served: Served, request: CallRequest, exchange: Exchange) -> ResponseStream:
        return ResponseStream(
            served,
            request,
            exchange,
            begun=document(served, request, exchange, "in_progress", []),
            finished=lambda record: finished(served, request, exchange, record),
        )

    def error(self, error: GatewayError) -> bytes:
        return error_body(error, "input")


class InputTokens:
    """How many tokens a request's prompt would have: those of the very prompt that asking would make."""

    path = "/v1/responses/input_tokens"
    fields = PROMPT_FIELDS

    def read(self, body: Any, past: Past) -> CallRequest:
        body = an_object(body)
        return _request(body, past, ignored=treat(PROMPT_FIELDS, body))

    def reply(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})

    def error(self, error: GatewayError) -> bytes:
        return error_body(error, "input")


def _request(body: dict[str, Any], past: Past, **fields: Any) -> CallRequest:
    messages, after = read_conversation(body, past)
    tools = read_tools(body.get("tools"))
    choice, text = body.get("tool_choice"), body.get("text")
    if text is not None and not isinstance(text, dict):
        raise bad(f"text must be an object, not {kind(text)}")
    return CallRequest(
        dialect=Responses.name,
        model=model_name(body),
        messages=messages,
        tools=tools,
        parse_tools=bool(tools) and choice != "none",
        constraint=constraint(
            tools,
            openai_choice(choice, tools),
            openai_format((text or {}).get("format"), "text.format", nested=False),
            parallel=body.get("parallel_tool_calls") is not False,
            fields=("tool_choice", "text"),
        ),
        after=after,
        notes={k: default if body.get(k) is None else body[k] for k, default in _ECHOED.items()},
        **fields,
    )


def document(
    served: Served, request: CallRequest, exchange: Exchange, status: str, output: list[Item]
) -> dict[str, Any]:
    """A response object. Its temperature and top_p are those that were sampled with."""
    sampling = exchange.session.record.sampling
    return {
        "id": f"resp_{exchange.exchange_id}",
        "object": "response",
        "created_at": int(exchange.created),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": request.model or served.model,
        "output": output,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "usage": None,
        **request.notes,
    }


def finished(served: Served, request: CallRequest, exchange: Exchange, record: CallRecord) -> dict[str, Any]:
    logprobs = token_logprobs(served, exchange.told(record)) if request.logprobs else None
    output = output_items(record.reply or {}, exchange.exchange_id, logprobs)
    cut = record.finish_reason == "length"
    if cut:
        output[-1]["status"] = "incomplete"
    usage = usage_of([record])
    return {
        **document(served, request, exchange, "incomplete" if cut else "completed", output),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "completed_at": int(record.ended_at),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }
