"""Pieces of a request that several dialects read alike. Invariant: what cannot be read is a 400 that names it."""

from __future__ import annotations

from typing import Any

import orjson

from areal_agent.errors import GatewayError

MAX_SIBLINGS = 128
"""Most choices of one request, OpenAI's own limit."""

MAX_STOPS = 16
MAX_LABELS = 16


def bad(message: str, code: str = "invalid_request") -> GatewayError:
    return GatewayError(message, status=400, code=code)


def an_object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise bad(f"the body must be a JSON object, not {kind(body)}")
    return body


def model_name(body: dict[str, Any]) -> str:
    """Any name is served by the policy; what is no name is none."""
    return body["model"] if isinstance(body.get("model"), str) else ""


def stops(raw: Any, name: str = "stop") -> tuple[str, ...]:
    found = [raw] if isinstance(raw, str) else raw or []
    if not isinstance(found, list) or len(found) > MAX_STOPS or not all(isinstance(s, str) for s in found):
        raise bad(f"{name} must be a string or a list of at most {MAX_STOPS} strings")
    return tuple(s for s in found if s)


def token_ids(raw: Any, name: str = "stop_token_ids") -> tuple[int, ...]:
    ids = raw or []
    if not isinstance(ids, list) or not all(type(t) is int and 0 <= t < 2**31 for t in ids):
        raise bad(f"{name} must be a list of token ids")
    return tuple(ids)


def integer(raw: Any, name: str, low: int, high: int) -> int | None:
    if raw is None:
        return None
    if type(raw) is not int or not low <= raw <= high:
        raise bad(f"{name} must be an integer from {low} to {high}, not {raw!r:.60}")
    return raw


def flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise bad(f"{name} must be true or false, not {value!r:.60}")
    return value


def labels(raw: Any) -> dict[str, str]:
    if raw is None:
        return {}
    if not isinstance(raw, dict) or len(raw) > MAX_LABELS:
        raise bad(f"metadata must be an object of at most {MAX_LABELS} strings")
    return {str(k)[:64]: str(v)[:512] for k, v in raw.items()}


def function_tool(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A tool as templates are shown it, from a dialect that spells it otherwise."""
    if not isinstance(name, str) or not name:
        raise bad(f"{where} must have a name")
    if parameters is not None and not isinstance(parameters, dict):
        raise bad(f"{where} must have a JSON schema for its arguments, not {kind(parameters)}")
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def function_call(call_id: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """One tool call of an assistant message. Arguments are text; a JSON value is written as text."""
    if not isinstance(name, str):
        raise bad(f"{where} must have a name")
    if not isinstance(arguments, str):
        arguments = orjson.dumps({} if arguments is None else arguments).decode()
    return {"id": str(call_id or ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a string", type(None): "null"}.get(
        type(value), f"{value!r}"[:40]
    )
