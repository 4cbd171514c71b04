"""Shapes that OpenAI's APIs have in common: the error object, logprobs of tokens, a line of a stream."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import orjson

from areal_agent.errors import GatewayError
from areal_gateway.dialects.base import Served
from areal_gateway.exchange import Told

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: every reader of server-sent events skips it, OpenAI's SDKs among them."""

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


def error_object(error: GatewayError, param: str) -> dict[str, Any]:
    """`param` is the field that holds the conversation: what a full context is blamed on."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    blamed = param if error.code == "context_length_exceeded" else None
    return {"message": str(error), "type": kind, "param": blamed, "code": error.code or None}


def error_body(error: GatewayError, param: str) -> bytes:
    return orjson.dumps({"error": error_object(error, param)})


def data_event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def finite(logprob: float) -> float | None:
    """JSON has no NaN; where the engine gave no logprob, neither is one told."""
    return logprob if math.isfinite(logprob) else None


def token_logprobs(served: Served, tokens: Iterable[Told]) -> list[dict[str, Any]]:
    """The entries of chat completions and responses, one a token."""
    return [
        {**_entry(served, t.token, t.logprob), "top_logprobs": [_entry(served, *e) for e in t.top]}
        for t in tokens
    ]


def _entry(served: Served, token: int, logprob: float) -> dict[str, Any]:
    text = served.tokens.text([token])
    return {
        "token": text,
        "logprob": finite(logprob),
        "bytes": None if "�" in text else list(text.encode()),
    }
