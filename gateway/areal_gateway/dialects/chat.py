"""OpenAI chat completions: POST /v1/chat/completions, streamed and not.

Invariant: a request is read completely before anything is done with it, and what the reply says is what
was sampled: `usage` counts the engine's ids, `logprobs` are the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from areal_agent.errors import GatewayError
from areal_gateway.canonical import role_of, text_of
from areal_gateway.dialects.base import Past, Served, usage_of
from areal_gateway.dialects.constraints import (
    FORCED_TOOLS,
    JSON_FORMATS,
    MAX_TOP_LOGPROBS,
    PARALLEL_CALLS,
    TOP_LOGPROBS,
    constraint,
    openai_choice,
    openai_format,
)
from areal_gateway.dialects.fields import Field, Treatment, treat
from areal_gateway.dialects.openai_shapes import (
    KEEP_ALIVE,
    data_event,
    error_body,
    error_object,
    token_logprobs,
)
from areal_gateway.dialects.reading import (
    MAX_SIBLINGS,
    an_object,
    bad,
    flag,
    function_call,
    integer,
    kind,
    labels,
    model_name,
    stops,
    token_ids,
)
from areal_gateway.exchange import CallRequest, Exchange, Said, Told
from areal_gateway.records import CallRecord

_T = Treatment
_DISTRIBUTION = "the run pins how the policy is sampled"
_WISH = f"{_DISTRIBUTION}, unless sampling.pinned is false"
_SERVICE = "it concerns OpenAI's own service"

FIELDS: dict[str, Field] = {
    "messages": Field(_T.HONOURED, "the conversation"),
    "model": Field(_T.HONOURED, "any name is served by the policy, and echoed"),
    "tools": Field(_T.HONOURED, "shown to the model by its template"),
    "tool_choice": Field(_T.HONOURED, FORCED_TOOLS),
    "parallel_tool_calls": Field(_T.IGNORED, PARALLEL_CALLS, lambda v: v is True),
    "n": Field(_T.HONOURED, "sibling calls of one prompt"),
    "max_tokens": Field(_T.HONOURED, "lowered to the run's cap and the room in the context"),
    "max_completion_tokens": Field(_T.HONOURED, "the same; it wins over max_tokens"),
    "stop": Field(_T.HONOURED, "ends the reply, and is not part of its text"),
    "stop_token_ids": Field(_T.HONOURED, "as vLLM has it"),
    "stream": Field(_T.HONOURED, "server-sent events"),
    "stream_options": Field(_T.HONOURED, "include_usage; without stream it means nothing and is accepted"),
    "logprobs": Field(_T.HONOURED, "of the sampled tokens"),
    "top_logprobs": Field(_T.HONOURED, TOP_LOGPROBS),
    "metadata": Field(_T.HONOURED, "labels of the call"),
    "temperature": Field(_T.PINNED, _WISH),
    "top_p": Field(_T.PINNED, _WISH),
    "top_k": Field(_T.PINNED, _WISH),
    "min_p": Field(_T.PINNED, _DISTRIBUTION, lambda v: v == 0),
    "seed": Field(_T.PINNED, "one seed for every session of a group would make their samples equal"),
    "frequency_penalty": Field(_T.PINNED, _DISTRIBUTION, lambda v: v == 0),
    "presence_penalty": Field(_T.PINNED, _DISTRIBUTION, lambda v: v == 0),
    "repetition_penalty": Field(_T.PINNED, _DISTRIBUTION, lambda v: v == 1),
    "logit_bias": Field(_T.PINNED, _DISTRIBUTION, lambda v: v == {}),
    "response_format": Field(_T.HONOURED, JSON_FORMATS),
    "reasoning_effort": Field(_T.IGNORED, "the run's template decides about thinking"),
    "verbosity": Field(_T.IGNORED, "the model has no such switch"),
    "chat_template_kwargs": Field(_T.IGNORED, "the run's template is the same for every call"),
    "modalities": Field(_T.REFUSED, "replies are text", lambda v: v == ["text"]),
    "audio": Field(_T.REFUSED, "replies are text"),
    "functions": Field(_T.REFUSED, "send `tools` instead", lambda v: v == []),
    "function_call": Field(_T.REFUSED, "send `tool_choice` instead", lambda v: v in ("auto", "none")),
    "web_search_options": Field(_T.REFUSED, "there is no web search behind this model"),
    "prediction": Field(_T.IGNORED, "it only saves time at OpenAI"),
    "store": Field(_T.IGNORED, _SERVICE, lambda v: v is False),
    "service_tier": Field(_T.IGNORED, _SERVICE, lambda v: v in ("auto", "default")),
    "user": Field(_T.IGNORED, _SERVICE),
    "safety_identifier": Field(_T.IGNORED, _SERVICE),
    "prompt_cache_key": Field(_T.IGNORED, _SERVICE),
    "prompt_cache_retention": Field(_T.IGNORED, _SERVICE),
    "prompt_cache_options": Field(_T.IGNORED, _SERVICE),
    "moderation": Field(_T.IGNORED, _SERVICE),
}


class ChatCompletions:
    name = "chat.completions"
    path = "/v1/chat/completions"
    fields = FIELDS

    def read(self, body: Any, past: Past) -> CallRequest:
        body = an_object(body)
        ignored = treat(FIELDS, body)
        tools = read_tools(body.get("tools"))
        choice = body.get("tool_choice")
        stream = flag(body, "stream")
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise bad(f"stream_options must be an object, not {kind(options)}")
        limit = body.get("max_completion_tokens")
        if limit is None:
            limit = body.get("max_tokens")
        top_logprobs = integer(body.get("top_logprobs"), "top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
        if top_logprobs and not flag(body, "logprobs"):
            raise bad(f"top_logprobs is {top_logprobs}, which needs logprobs: true")
        return CallRequest(
            dialect=self.name,
            model=model_name(body),
            messages=read_messages(body.get("messages")),
            tools=tools,
            parse_tools=bool(tools) and choice != "none",
            n=integer(body.get("n"), "n", 1, MAX_SIBLINGS) or 1,
            max_tokens=integer(limit, "max_completion_tokens", 1, 2**31 - 1),
            stop=stops(body.get("stop")),
            stop_token_ids=token_ids(body.get("stop_token_ids")),
            stream=stream,
            include_usage=stream and options.get("include_usage") is True,
            logprobs=flag(body, "logprobs"),
            top_logprobs=top_logprobs,
            constraint=constraint(
                tools,
                openai_choice(choice, tools),
                openai_format(body.get("response_format"), "response_format", nested=True),
                parallel=body.get("parallel_tool_calls") is not False,
                fields=("tool_choice", "response_format"),
            ),
            ignored=ignored,
            labels=labels(body.get("metadata")),
        )

    def reply(self, served: Served, request: CallRequest, exchange: Exchange) -> bytes:
        return orjson.dumps(
            {
                "id": f"chatcmpl-{exchange.exchange_id}",
                "object": "chat.completion",
                "created": int(exchange.created),
                "model": request.model or served.model,
                "choices": [
                    {
                        "index": r.index,
                        "message": {"refusal": None, **(r.reply or {})},
                        "logprobs": _logprobs(served, exchange.told(r)) if request.logprobs else None,
                        "finish_reason": r.finish_reason,
                    }
                    for r in exchange.records
                ],
                "usage": usage_of(exchange.records),
            }
        )

    def stream(self, served: Served, request: CallRequest, exchange: Exchange) -> ChatStream:
        return ChatStream(served, request, exchange)

    def error(self, error: GatewayError) -> bytes:
        return error_body(error, "messages")


class ChatStream:
    """Chunks of one streamed chat completion. A tool call is one chunk, with its index and all its arguments."""

    def __init__(self, served: Served, request: CallRequest, exchange: Exchange) -> None:
        self._served = served
        self._request = request
        self._head = {
            "id": f"chatcmpl-{exchange.exchange_id}",
            "object": "chat.completion.chunk",
            "created": int(exchange.created),
            "model": request.model or served.model,
        }
        self._begun: set[int] = set()

    def said(self, said: Said) -> bytes:
        out = b""
        if said.index not in self._begun:
            self._begun.add(said.index)
            out += self._choice(said.index, {"role": "assistant", "content": ""})
        logprobs = (
            _logprobs(self._served, said.logprobs) if self._request.logprobs and said.logprobs else None
        )
        if said.record is not None:
            return out + self._choice(said.index, {}, logprobs, said.record.finish_reason)
        delta: dict[str, Any] = {}
        if said.delta is not None:
            if said.delta.reasoning:
                delta["reasoning_content"] = said.delta.reasoning
            if said.delta.content:
                delta["content"] = said.delta.content
            if said.delta.tool_call is not None:
                delta["tool_calls"] = [{"index": said.delta.index, **said.delta.tool_call}]
        return out + self._choice(said.index, delta, logprobs)

    def failed(self, error: GatewayError) -> bytes:
        return data_event({"error": error_object(error, "messages")})

    def idle(self) -> bytes:
        return KEEP_ALIVE

    def done(self, records: list[CallRecord]) -> bytes:
        out = b""
        if self._request.include_usage:
            out = data_event({**self._head, "choices": [], "usage": usage_of(records)})
        return out + b"data: [DONE]\n\n"

    def _choice(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._head, "choices": [choice]}
        if self._request.include_usage:
            chunk["usage"] = None
        return data_event(chunk)


def _logprobs(served: Served, tokens: Iterable[Told]) -> dict[str, Any]:
    return {"content": token_logprobs(served, tokens), "refusal": None}


# -- reading ---------------------------------------------------------------------------------------

_ROLES = ("system", "user", "assistant", "tool")


def read_messages(raw: Any) -> list[dict[str, Any]]:
    """Messages in the shape renderers take. Raises GatewayError (400) naming the message that is wrong."""
    if not isinstance(raw, list) or not raw:
        raise bad(f"messages must be a list with at least one message, not {kind(raw)}")
    return [_message(m, i) for i, m in enumerate(raw)]


def _message(raw: Any, i: int) -> dict[str, Any]:
    if not isinstance(raw, dict) or not isinstance(raw.get("role"), str):
        raise bad(f"messages[{i}] must be an object with a role")
    role = role_of(raw)
    if role not in _ROLES:
        raise bad(f"messages[{i}] has role {raw['role']!r}; known are developer, {', '.join(_ROLES)}")
    content = text_of(raw.get("content"))
    if not isinstance(content, str):
        raise bad(
            f"messages[{i}] has content that is not text; this model reads text only", "unsupported_content"
        )
    message: dict[str, Any] = {"role": role, "content": content}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(raw.get(key), str):
            message[key] = raw[key]
    if role == "assistant" and (calls := _calls(raw, i)):
        message["tool_calls"] = calls
    return message


def _calls(raw: dict[str, Any], i: int) -> list[dict[str, Any]]:
    calls = raw.get("tool_calls") or []
    if not calls and raw.get("function_call"):
        calls = [{"function": raw["function_call"]}]
    if not isinstance(calls, list):
        raise bad(f"messages[{i}].tool_calls must be a list, not {kind(calls)}")
    out = []
    for j, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad(f"messages[{i}].tool_calls[{j}] must have a function with a name")
        where = f"messages[{i}].tool_calls[{j}]"
        out.append(function_call(call.get("id"), function["name"], function.get("arguments"), where))
    return out


def read_tools(raw: Any) -> list[dict[str, Any]]:
    """Tools as the template is shown them: type, then name, description, parameters, then the rest.

    The order is fixed here, because clients differ in it and it is part of the prompt.
    """
    if not raw:
        return []
    if not isinstance(raw, list):
        raise bad(f"tools must be a list, not {kind(raw)}")
    out = []
    for i, tool in enumerate(raw):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad(
                f"tools[{i}] must be {{type: function, function: {{name, ...}}}}; other tools are not served"
            )
        first = {k: function[k] for k in ("name", "description", "parameters") if function.get(k) is not None}
        rest = {k: v for k, v in function.items() if k not in first and v is not None}
        out.append({"type": "function", "function": {**first, **rest}})
    return out
