"""From Anthropic's messages, blocks and tools to the chat shape that renderers take.

Invariant: what a client echoes of a reply becomes the message that was stored, block for block: text blocks
are its content, tool_use blocks its tool calls, thinking blocks its reasoning. A user message is taken apart
in order: each tool_result is a tool message, the text around them a user message.

`is_error` of a tool_result has no place in the chat shape and is not shown; its content is.
"""

from __future__ import annotations

from typing import Any

import orjson

from areal_gateway.dialects.reading import bad, function_call, function_tool, kind

Message = dict[str, Any]

BILLING = "x-anthropic-billing-header:"
"""Claude Code sends its billing line as the first block of `system`, with a value that changes on every
request. It is no part of the prompt; kept in, no turn would continue the one before."""


def read_conversation(body: dict[str, Any]) -> list[Message]:
    """System prompt and messages. Raises GatewayError (400) naming the block that is wrong."""
    out: list[Message] = []
    if system := _system(body.get("system")):
        out.append({"role": "system", "content": system})
    raw = body.get("messages")
    if not isinstance(raw, list) or not raw:
        raise bad(f"messages must be a list with at least one message, not {kind(raw)}")
    for i, message in enumerate(raw):
        out.extend(_message(message, f"messages[{i}]"))
    if out[-1]["role"] == "assistant":
        raise bad(
            "the last message is the assistant's, and this model does not continue a reply that was begun for "
            "it: the conversation must end with a user message",
            "prefill_unsupported",
        )
    return out


def read_tools(raw: Any) -> list[dict[str, Any]]:
    if not raw:
        return []
    if not isinstance(raw, list):
        raise bad(f"tools must be a list, not {kind(raw)}")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(raw)]


def _tool(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise bad(f"{where} must be an object, not {kind(raw)}")
    if raw.get("type") not in (None, "custom"):
        raise bad(
            f"{where} has type {raw['type']!r:.60}, which only Anthropic runs; send a tool with an input_schema",
            "unsupported_tool",
        )
    return function_tool(raw.get("name"), raw.get("description"), raw.get("input_schema"), where)


def _system(raw: Any) -> str:
    if raw is None or isinstance(raw, str):
        return raw or ""
    texts = [_text(b, f"system[{i}]") for i, b in enumerate(_blocks(raw, "system"))]
    return "".join(t for t in texts if not t.startswith(BILLING))


def _message(raw: Any, where: str) -> list[Message]:
    if not isinstance(raw, dict):
        raise bad(f"{where} must be an object with a role")
    match raw.get("role"):
        case "assistant":
            return [_assistant(raw.get("content"), where)]
        case "user":
            return _user(raw.get("content"), where)
        case "system":
            return [{"role": "system", "content": _joined(raw.get("content"), f"{where}.content")}]
        case role:
            raise bad(f"{where} has role {role!r:.60}; known are user, assistant, system")


def _assistant(content: Any, where: str) -> Message:
    text, thinking, calls = "", "", []
    for j, block in enumerate(_blocks(content, f"{where}.content")):
        at = f"{where}.content[{j}]"
        match block.get("type"):
            case "thinking":
                thinking += _string(block.get("thinking"), at)
            case "redacted_thinking":  # another model's, unreadable; ours are never redacted
                continue
            case "tool_use":
                calls.append(function_call(block.get("id"), block.get("name"), block.get("input"), at))
            case _:
                text += _text(block, at)
    message: Message = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    return message


def _user(content: Any, where: str) -> list[Message]:
    out: list[Message] = []
    text: list[str] = []

    def say() -> None:
        if text:
            out.append({"role": "user", "content": "".join(text)})
            text.clear()

    for j, block in enumerate(_blocks(content, f"{where}.content")):
        at = f"{where}.content[{j}]"
        if block.get("type") == "tool_result":
            say()
            result = _joined(block.get("content"), f"{at}.content")
            out.append(
                {"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": result}
            )
        else:
            text.append(_text(block, at))
    say()
    return out or [{"role": "user", "content": ""}]


def _joined(content: Any, where: str) -> str:
    return "".join(_text(b, f"{where}[{j}]") for j, b in enumerate(_blocks(content, where)))


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(b, dict) for b in content):
        raise bad(f"{where} must be a string or a list of blocks, not {kind(content)}")
    return content


def _text(block: dict[str, Any], where: str) -> str:
    if block.get("type") != "text":
        raise bad(
            f"{where} is a block of type {block.get('type')!r:.60}; this model reads text only",
            "unsupported_content",
        )
    return _string(block.get("text"), where)


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise bad(f"{where} must hold a string, not {kind(value)}")
    return value


def tool_input(arguments: str) -> Any:
    """A tool call's arguments as the value that `input` holds, such that its echo compares equal."""
    try:
        return orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:  # a policy may write anything; as text it comes back as it went
        return arguments
