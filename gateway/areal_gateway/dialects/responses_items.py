"""Items of the Responses API to messages in the chat shape, and a reply to items.

Invariant: the items of a reply, given back as input in their order, are the message that was stored. A reply
is at most one reasoning item, then at most one message, then its function calls; their ids carry the id of
the exchange, so that an item can be referred to.
"""

from __future__ import annotations

from typing import Any

from areal_gateway.dialects.base import Past
from areal_gateway.dialects.reading import bad, function_call, function_tool, kind

Message = dict[str, Any]
Item = dict[str, Any]

INSTRUCTIONS = "instructions"
"""Key that marks the system message made of `instructions`: the API does not carry them over to a response
that follows by `previous_response_id`, while system messages of the input it does. Renderers look past it."""

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def read_conversation(body: dict[str, Any], past: Past) -> tuple[list[Message], str | None]:
    """(messages, the exchange that they continue by `previous_response_id`). Raises GatewayError (400)."""
    messages: list[Message] = []
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise bad(f"instructions must be a string, not {kind(instructions)}")
    if instructions:
        messages.append({"role": "system", "content": instructions, INSTRUCTIONS: True})
    after, before = _previous(body.get("previous_response_id"), past)
    messages += [m for m in before if not m.get(INSTRUCTIONS)]
    raw = body.get("input")
    if isinstance(raw, str):
        raw = [{"role": "user", "content": raw}]
    if not isinstance(raw, list) or not raw:
        raise bad(f"input must be a string or a list with at least one item, not {kind(raw)}")
    return messages + read_items(raw, past), after


def _previous(raw: Any, past: Past) -> tuple[str | None, list[Message]]:
    if raw is None:
        return None, []
    if isinstance(raw, str) and raw.startswith("resp_"):
        exchange_id = raw.removeprefix("resp_")
        if (before := past.conversation(exchange_id)) is not None:
            return exchange_id, before
    raise bad(
        f"Previous response with id {raw!r:.80} not found: this session gave no such reply",
        "previous_response_not_found",
    )


def read_items(raw: list[Any], past: Past) -> list[Message]:
    """Items -> messages. What the assistant did between two others' turns is one message."""
    out: list[Message] = []
    for i, item in enumerate(raw):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise bad(f"{where} must be an object, not {kind(item)}")
        if item.get("type") == "item_reference" or set(item) == {"id"}:
            item = _referred(item, past, where)
        match item.get("type") or "message":
            case "message":
                _add_message(out, item, where)
            case "reasoning":
                assistant = _assistant(out, fresh=("content", "tool_calls"))
                assistant["reasoning_content"] = assistant.get("reasoning_content", "") + _reasoning(
                    item, where
                )
            case "function_call":
                call = function_call(item.get("call_id"), item.get("name"), item.get("arguments"), where)
                _assistant(out).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = _text(item.get("output"), f"{where}.output")
                out.append(
                    {"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": content}
                )
            case other:
                raise bad(
                    f"{where} is an item of type {other!r:.60}, which only OpenAI can read",
                    "unsupported_item",
                )
    return out


def _assistant(out: list[Message], fresh: tuple[str, ...] = ()) -> Message:
    """The assistant's message at the end, or a new one where there is none or it has one of `fresh` already."""
    if not out or out[-1]["role"] != "assistant" or any(out[-1].get(k) for k in fresh):
        out.append({"role": "assistant", "content": ""})
    return out[-1]


def _add_message(out: list[Message], item: Item, where: str) -> None:
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise bad(f"{where} has role {item.get('role')!r:.60}; known are {', '.join(_ROLES)}")
    content = _text(item.get("content"), f"{where}.content")
    if role == "assistant":
        _assistant(out, fresh=("content", "tool_calls"))["content"] = content
    else:
        out.append({"role": role, "content": content})


def _text(raw: Any, where: str) -> str:
    if raw is None or isinstance(raw, str):
        return raw or ""
    if not isinstance(raw, list):
        raise bad(f"{where} must be a string or a list of parts, not {kind(raw)}")
    texts = []
    for j, part in enumerate(raw):
        if not isinstance(part, dict):
            raise bad(f"{where}[{j}] must be an object, not {kind(part)}")
        name = "refusal" if part.get("type") == "refusal" else "text"
        known = part.get("type") in ("input_text", "output_text", "text", "refusal")
        if not known or not isinstance(part.get(name), str):
            raise bad(
                f"{where}[{j}] is a part of type {part.get('type')!r:.60}; this model reads text only",
                "unsupported_content",
            )
        texts.append(part[name])
    return "".join(texts)


def _reasoning(item: Item, where: str) -> str:
    """Its content, else its summary, else nothing: what is encrypted only OpenAI can read."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(p, dict) for p in parts):
            raise bad(f"{where}.{name} must be a list of objects, not {kind(parts)}")
        if parts:
            return "".join(str(p.get("text") or "") for p in parts)
    return ""


def _referred(item: Item, past: Past, where: str) -> Item:
    """The item of an earlier reply that this id names."""
    pieces = str(item.get("id") or "").split("_")
    before = past.conversation(pieces[1]) if len(pieces) > 1 else None
    found = [i for i in output_items(before[-1], pieces[1]) if i["id"] == item["id"]] if before else []
    if not found:
        raise bad(f"{where} refers to {item.get('id')!r:.80}, which this session never said", "unknown_item")
    return found[0]


# -- the other way ---------------------------------------------------------------------------------


def output_items(reply: Message, exchange_id: str, logprobs: list[Any] | None = None) -> list[Item]:
    """A reply as items. Never none: a reply of nothing is a message of no text."""
    items: list[Item] = []
    if reply.get("reasoning_content"):
        items.append(reasoning_item(exchange_id, reply["reasoning_content"]))
    calls = reply.get("tool_calls") or []
    if reply.get("content") or not calls:
        items.append(message_item(exchange_id, reply.get("content") or "", logprobs))
    return items + [call_item(exchange_id, i, call) for i, call in enumerate(calls)]


def reasoning_item(exchange_id: str, text: str) -> Item:
    return {
        "id": f"rs_{exchange_id}",
        "type": "reasoning",
        "summary": [],
        "content": [reasoning_part(text)],
        "status": "completed",
    }


def message_item(exchange_id: str, text: str, logprobs: list[Any] | None) -> Item:
    return {
        "id": f"msg_{exchange_id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [text_part(text, logprobs)],
    }


def call_item(exchange_id: str, index: int, call: dict[str, Any]) -> Item:
    return {
        "id": f"fc_{exchange_id}_{index}",
        "type": "function_call",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
        "status": "completed",
    }


def reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def text_part(text: str, logprobs: list[Any] | None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def read_tools(raw: Any) -> list[dict[str, Any]]:
    """Flat function tools -> the nested shape. `strict` is not shown: it is about a grammar."""
    if not raw:
        return []
    if not isinstance(raw, list):
        raise bad(f"tools must be a list, not {kind(raw)}")
    out = []
    for i, tool in enumerate(raw):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            what = tool.get("type") if isinstance(tool, dict) else tool
            raise bad(f"tools[{i}] is {what!r:.60}; only function tools are served", "unsupported_tool")
        out.append(
            function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"), f"tools[{i}]")
        )
    return out
