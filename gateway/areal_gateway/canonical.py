"""When are two messages the same message? The answer decides whether a call extends another.

Agents do not echo a reply as they got it: frameworks rebuild it from their own types. So messages are
compared by what the model would be shown, after these reductions, and by nothing else:

- role: `developer` is `system`, `function` is `tool`;
- content: null, absent, "" and [] are equal; a list of text parts equals their concatenation;
- tool calls: order, name and arguments count; arguments are compared as JSON values (key order, white
  space, 1.0 and 1, "" and {} do not matter), or as text where they are no JSON; `id`, `type` and `index`
  do not count; the older `function_call` is one tool call;
- `name` counts for user and system messages only; `refusal`, `annotations`, `audio`, `reasoning_content`,
  `tool_call_id` and every other key do not count.

The reductions are only for comparing. What is stored and rendered keeps the sampled ids, or the agent's
own words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import orjson

ROOT = b"\0" * 16
"""The key of the empty conversation."""

_ROLES = {"developer": "system", "function": "tool"}


def role_of(message: dict[str, Any]) -> str:
    role = str(message.get("role", ""))
    return _ROLES.get(role, role)


def text_of(content: Any) -> Any:
    """Content as one string where it is text only, else the content itself."""
    if content is None:
        return ""
    if isinstance(content, list):
        texts = [_part_text(part) for part in content]
        if all(t is not None for t in texts):
            return "".join(t for t in texts if t is not None)
    return content


def _part_text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text"):
        text = part.get("text")
        return text if isinstance(text, str) else None
    return None


def tool_calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """(name, arguments) of each tool call, arguments as a JSON value or as text."""
    calls = message.get("tool_calls") or []
    if not calls and message.get("function_call"):
        calls = [{"function": message["function_call"]}]
    out = []
    for call in calls:
        function = call.get("function") or {}
        out.append((function.get("name") or "", _arguments(function.get("arguments"))))
    return out


def tool_call_ids(message: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(call.get("id") or "") for call in message.get("tool_calls") or [])


def _arguments(raw: Any) -> Any:
    if isinstance(raw, str):
        if not raw.strip():
            return {}
        try:
            raw = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return raw
    return {} if raw is None else _numbers(raw)


def _numbers(value: Any) -> Any:
    """1.0 -> 1 throughout: a JSON round trip through another language writes it so."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_numbers(v) for v in value]
    if isinstance(value, dict):
        return {k: _numbers(v) for k, v in value.items()}
    return value


def canonical(message: dict[str, Any]) -> bytes:
    """The part of a message that counts, as bytes."""
    role = role_of(message)
    parts: list[Any] = [role, text_of(message.get("content"))]
    if role == "assistant":
        parts.append(tool_calls_of(message))
    elif role in ("user", "system"):
        parts.append(message.get("name") or "")
    return orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)


def extend(key: bytes, message: dict[str, Any]) -> bytes:
    """The key of a conversation with one more message: a hash chain, so every prefix has its own key.

    SHA-256, for which CPUs have instructions: half the time of BLAKE2. No key is stored.
    """
    return hashlib.sha256(key + canonical(message)).digest()[:16]


def chain(messages: Iterable[dict[str, Any]], start: bytes = ROOT) -> list[bytes]:
    """keys[i] is the key of the first i messages; len(messages) + 1 of them."""
    keys = [start]
    for message in messages:
        keys.append(extend(keys[-1], message))
    return keys


def tools_key(tools: list[dict[str, Any]]) -> bytes:
    """Equal for equal tool lists. Order and every word count: the prompt shows them all to the model.

    Ledgers have it as the key of their tool lists, and a call that goes on relies on its parent's being there:
    it has to stay as it is.
    """
    return hashlib.blake2b(orjson.dumps(tools), digest_size=16).digest()
