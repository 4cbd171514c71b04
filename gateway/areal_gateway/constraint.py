"""What a request allows its replies to be: a JSON format, or a tool that has to be called.

Invariant: a constraint either holds for every token of the reply, by the engine's guided decoding, or the
request is served without it and says so. A call that was constrained is context and is never trained: its
logprobs are those of the distribution that was sampled, renormalised over the tokens that the grammar
allowed, and the trainer, which knows no grammar, would compute others.

Structural tags: https://xgrammar.mlc.ai/docs/structural_tag/structural_tag.html; the field that takes them is
`structured_outputs` of vLLM's sampling parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from areal_gateway.tokens import ReplySyntax

Format = dict[str, Any]

THOUGHTS = ("<think>", "</think>")
CALLS = ("<tool_call>", "</tool_call>")

ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Constraint:
    """How replies are constrained, whichever dialect asked.

    Attributes:
        fields: names of the request's fields that ask for it, for saying that they had no effect.
        schema: JSON schema of the reply's text; None where the text is free. With tools on offer, and none of them
            forced, a reply is either such a text or calls of tools.
        forced: names of the tools of which one has to be called; None where none is forced. It wins over
            `schema`, because a reply that has to call a tool has no text.
        parallel: whether a reply that has to call a tool may make more than one call.
    """

    fields: tuple[str, ...]
    schema: dict[str, Any] | None = None
    forced: tuple[str, ...] | None = None
    parallel: bool = True

    @property
    def reason(self) -> str:
        """Why a call under it is not trained."""
        what = "a tool that had to be called" if self.forced else "a JSON format"
        return f"its sampling was constrained to {what}; the trainer's distribution has no such constraint"

    def structured_outputs(self, tools: list[dict[str, Any]], syntax: ReplySyntax) -> dict[str, Any] | None:
        """vLLM's `structured_outputs`, or None where it cannot be said for this model.

        `tools` are those that the reply may call, none where it is read without calls.
        """
        if not syntax.known or (tools and not syntax.json_calls):
            return None
        markup = (THOUGHTS if syntax.thinks else ()) + (CALLS if tools else ())
        if any(token not in syntax.ids for token in markup):
            return None
        if self.forced is not None:
            if not self.forced:
                return None
            wanted = [t for t in tools if t["function"]["name"] in self.forced]
            body = _calls(wanted, syntax, parallel=self.parallel)
        elif self.schema is None:
            return None
        elif tools:
            body = {"type": "or", "elements": [_json(self.schema), _calls(tools, syntax, parallel=True)]}
        elif not syntax.thinks:
            return {"json": self.schema}
        else:
            body = _json(self.schema)
        if syntax.thinks:
            body = {"type": "sequence", "elements": [_thinking(syntax), _text("\n\n"), body]}
        return {"structural_tag": orjson.dumps({"type": "structural_tag", "format": body}).decode()}


def _token(text: str, syntax: ReplySyntax) -> Format:
    """The one token that is spelt so: its letters, token by token, would not be read as markup.

    By its id, because vLLM checks a tag before it has a tokenizer at hand.
    """
    return {"type": "token", "token": syntax.ids[text]}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _json(schema: dict[str, Any]) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def _thinking(syntax: ReplySyntax) -> Format:
    return {
        "type": "tag",
        "begin": _token("<think>", syntax),
        "content": {"type": "any_tokens", "exclude_tokens": [syntax.ids["</think>"]]},
        "end": _token("</think>", syntax),
    }


def _calls(tools: list[dict[str, Any]], syntax: ReplySyntax, *, parallel: bool) -> Format:
    """One call of any of the tools, or more, as Qwen3 and Hermes write them."""
    return {
        "type": "tags_with_separator",
        "tags": [_call(t["function"], syntax) for t in tools],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _call(function: dict[str, Any], syntax: ReplySyntax) -> Format:
    arguments = dict(function.get("parameters") or ANY_OBJECT)
    # `#/$defs/...` is looked up from the root, which the arguments no longer are.
    shared = {k: arguments.pop(k) for k in ("$defs", "definitions") if k in arguments}
    schema = {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        **shared,
    }
    return {
        "type": "tag",
        "begin": _token("<tool_call>", syntax),
        "content": {"type": "sequence", "elements": [_text("\n"), _json(schema), _text("\n")]},
        "end": _token("</tool_call>", syntax),
    }
