"""Reading fields of admin requests. Every complaint names the field, its value, and what is allowed."""

from __future__ import annotations

import math
from typing import Any

from areal_agent.errors import GatewayError

_REQUIRED: Any = object()


def bad(message: str) -> GatewayError:
    return GatewayError(message, status=400, code="invalid_request")


def mapping(value: Any, name: str = "the body") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad(f"{name} must be a JSON object, not {value!r:.60}")
    return value


def text(body: dict[str, Any], name: str, default: str = _REQUIRED) -> str:
    value = body.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if not isinstance(value, str) or (default is _REQUIRED and not value) or len(value) > 4096:
        raise bad(f"{name} must be a string of 1 to 4096 characters, not {value!r:.60}")
    return value


def number(
    body: dict[str, Any],
    name: str,
    default: float = _REQUIRED,
    *,
    low: float = -math.inf,
    high: float = math.inf,
) -> float:
    value = body.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise bad(f"{name} must be a number from {low:g} to {high:g}, not {value!r:.60}")
    return float(value)


def integer(body: dict[str, Any], name: str, default: int = _REQUIRED, *, low: int, high: int = 2**53) -> int:
    value = body.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if type(value) is not int or not low <= value <= high:
        raise bad(f"{name} must be an integer from {low} to {high}, not {value!r:.60}")
    return value


def choice(body: dict[str, Any], name: str, allowed: tuple[str, ...], default: str = _REQUIRED) -> str:
    value = body.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if value not in allowed:
        raise bad(f"{name} must be one of {', '.join(allowed)}, not {value!r:.60}")
    return value


def labels(body: dict[str, Any], name: str = "labels") -> dict[str, str]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > 64:
        raise bad(f"{name} must be an object of at most 64 strings")
    return {str(k)[:64]: str(v)[:1024] for k, v in value.items()}


def reward_value(body: dict[str, Any]) -> float | None:
    """`value`: a finite number, or null for missing."""
    if "value" not in body:
        raise bad("value is required: a number, or null when the reward is missing")
    if body["value"] is None:
        return None
    value = number(body, "value")
    if not math.isfinite(value):
        raise bad(f"value must be finite, not {value}; send null when the reward is missing")
    return value
