"""Reading what constrains a reply: forced tools and JSON formats, as each API spells them.

Invariant: a request that asks for a tool that is not on offer, or for a format without a schema, is a 400 that
names it; whether a constraint can be kept is not decided here.
"""

from __future__ import annotations

from typing import Any

from areal_gateway.constraint import ANY_OBJECT, Constraint
from areal_gateway.dialects.reading import bad, kind

MAX_TOP_LOGPROBS = 20
"""OpenAI's own limit."""

_UNTRAINED = (
    "the call is then context and is not trained. Where the model's syntax is not known, or gateway.constrain is "
    "false, it has no effect and is named in x-areal-ignored"
)
FORCED_TOOLS = f"none: what looks like a call is text; a tool that has to be called constrains the sampling, {_UNTRAINED}"
JSON_FORMATS = f"a JSON schema or JSON object constrains the sampling, {_UNTRAINED}"
PARALLEL_CALLS = (
    "it would constrain the sampling of free replies; it is honoured where a tool has to be called"
)
TOP_LOGPROBS = (
    "the likeliest tokens at each position, where logprobs are asked for; they are not kept in the ledger"
)

Tools = list[dict[str, Any]]


def constraint(
    tools: Tools,
    forced: tuple[str, ...] | None,
    schema: dict[str, Any] | None,
    *,
    parallel: bool,
    fields: tuple[str, str],
) -> Constraint | None:
    """`fields`: the names of the request's fields that force a tool and that ask for a format."""
    if forced is None and schema is None:
        return None
    asked = tuple(f for f, value in zip(fields, (forced, schema), strict=True) if value is not None)
    return Constraint(asked, schema, forced, parallel)


def openai_choice(choice: Any, tools: Tools) -> tuple[str, ...] | None:
    """Names of the tools of which one has to be called; None where none is forced. The shapes of chat completions and of responses."""
    if choice is None or choice in ("auto", "none"):
        return None
    if choice == "required":
        return _on_offer(_names(tools), tools)
    if not isinstance(choice, dict):
        raise bad(
            f"tool_choice must be none, auto, required or an object that names a tool, not {choice!r:.60}"
        )
    if choice.get("type") == "function":
        function = choice.get("function")
        return _on_offer((_name(function if isinstance(function, dict) else choice),), tools)
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        return _allowed(allowed if isinstance(allowed, dict) else choice, tools)
    raise bad(
        f"tool_choice has type {choice.get('type')!r:.60}; only function tools are served", "unsupported_tool"
    )


def anthropic_choice(choice: Any, tools: Tools) -> tuple[str, ...] | None:
    """Names of the tools of which one has to be called; None where none is forced."""
    kind_ = choice.get("type") if isinstance(choice, dict) else None
    if choice is None or kind_ in ("auto", "none"):
        return None
    if kind_ == "any":
        return _on_offer(_names(tools), tools)
    if kind_ == "tool":
        return _on_offer((_name(choice),), tools)
    raise bad(f"tool_choice.type must be auto, any, tool or none, not {choice!r:.60}")


def openai_format(raw: Any, where: str, *, nested: bool) -> dict[str, Any] | None:
    """The JSON schema that a reply's text has to meet, None where it is free.

    `nested`: the schema is under `json_schema`, as chat completions have it, not beside the type.
    """
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise bad(f"{where} must be an object, not {kind(raw)}")
    match raw.get("type"):
        case "text":
            return None
        case "json_object":
            return ANY_OBJECT
        case "json_schema":
            holder = raw.get("json_schema") if nested else raw
            schema = holder.get("schema") if isinstance(holder, dict) else None
            if not isinstance(schema, dict):
                raise bad(
                    f"{where} of type json_schema must have a schema that is an object, not {kind(schema)}"
                )
            return schema
        case other:
            raise bad(f"{where}.type must be text, json_object or json_schema, not {other!r:.60}")


def _allowed(allowed: dict[str, Any], tools: Tools) -> tuple[str, ...] | None:
    """A choice among some of the tools; only with mode `required` does it force one."""
    if allowed.get("mode") != "required":
        return None
    named = allowed.get("tools")
    if not isinstance(named, list) or not named:
        raise bad("tool_choice.allowed_tools must list at least one tool")
    found = [
        t.get("function") if isinstance(t, dict) and isinstance(t.get("function"), dict) else t for t in named
    ]
    return _on_offer(tuple(_name(t) for t in found), tools)


def _name(holder: Any) -> str:
    name = holder.get("name") if isinstance(holder, dict) else None
    if not isinstance(name, str):
        raise bad(f"tool_choice must name a tool, not {name!r:.60}")
    return name


def _names(tools: Tools) -> tuple[str, ...]:
    return tuple(t["function"]["name"] for t in tools)


def _on_offer(names: tuple[str, ...], tools: Tools) -> tuple[str, ...]:
    """The names, checked; none where no tool is on offer at all, so that none can be called."""
    offered = _names(tools)
    if unknown := [name for name in names if tools and name not in offered]:
        raise bad(f"tool_choice names {unknown[0]!r:.60}, but the tools are {', '.join(offered)}")
    return names if tools else ()
