"""OpenAI's older completions: POST /v1/completions, streamed and not, of text or of token ids.

Invariant: the prompt is tokenised as it stands and the reply is the text that was sampled, nothing stripped
or parsed. Sending both back with more behind them continues the stored ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from areal_agent.errors import GatewayError
from areal_gateway.dialects.base import Past, Served
from areal_gateway.dialects.constraints import MAX_TOP_LOGPROBS
from areal_gateway.dialects.fields import Field, Treatment, treat
from areal_gateway.dialects.openai_shapes import KEEP_ALIVE, data_event, error_body, error_object, finite
from areal_gateway.dialects.reading import (
    MAX_SIBLINGS,
    an_object,
    bad,
    flag,
    integer,
    kind,
    labels,
    model_name,
    stops,
    token_ids,
)
from areal_gateway.exchange import CallRequest, Exchange, Prompt, Said, Told
from areal_gateway.records import CallRecord

_T = Treatment
_DISTRIBUTION = "the run pins how the policy is sampled"
_WISH = f"{_DISTRIBUTION}, unless sampling.pinned is false"
_SERVICE = "it concerns OpenAI's own service"

FIELDS: dict[str, Field] = {
    "prompt": Field(_T.HONOURED, "text or token ids, or a list of them; special tokens in text are tokens"),
    "model": Field(_T.HONOURED, "any name is served by the policy, and echoed"),
    "n": Field(_T.HONOURED, "sibling calls of each prompt"),
    "max_tokens": Field(
        _T.HONOURED,
        "lowered to the run's cap and the room in the context; absent it is all that room, not OpenAI's 16",
    ),
    "stop": Field(_T.HONOURED, "ends the reply, and is not part of its text"),
    "stop_token_ids": Field(_T.HONOURED, "as vLLM has it"),
    "stream": Field(_T.HONOURED, "server-sent events"),
    "stream_options": Field(_T.HONOURED, "include_usage; without stream it means nothing and is accepted"),
    "logprobs": Field(
        _T.HONOURED,
        "of the sampled tokens, and of that many of the likeliest at each position; they are not kept in the ledger",
    ),
    "return_token_ids": Field(
        _T.HONOURED, "as vLLM has it: what a prompt of ids needs to be continued exactly"
    ),
    "metadata": Field(_T.HONOURED, "labels of the call"),
    "echo": Field(
        _T.REFUSED,
        "the prompt's own logprobs are not computed; put it before the text yourself",
        lambda v: v is False,
    ),
    "best_of": Field(
        _T.REFUSED, "every sample is trained, so every sample is returned; ask for n", lambda v: v == 1
    ),
    "suffix": Field(_T.REFUSED, "the model continues a text, it does not fill one in", lambda v: v == ""),
    "temperature": Field(_T.PINNED, _WISH),
    "top_p": Field(_T.PINNED, _WISH),
    "top_k": Field(_T.PINNED, _WISH),
    "min_p": Field(_T.PINNED, _DISTRIBUTION, lambda v: v == 0),
    "seed": Field(_T.PINNED, "one seed for every session of a group would make their samples equal"),
    "frequency_penalty": Field(_T.PINNED, _DISTRIBUTION, lambda v: v == 0),
    "presence_penalty": Field(_T.PINNED, _DISTRIBUTION, lambda v: v == 0),
    "repetition_penalty": Field(_T.PINNED, _DISTRIBUTION, lambda v: v == 1),
    "logit_bias": Field(_T.PINNED, _DISTRIBUTION, lambda v: v == {}),
    "user": Field(_T.IGNORED, _SERVICE),
}


class Completions:
    name = "completions"
    path = "/v1/completions"
    fields = FIELDS

    def read(self, body: Any, past: Past) -> CallRequest:
        body = an_object(body)
        ignored = treat(FIELDS, body)
        stream = flag(body, "stream")
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise bad(f"stream_options must be an object, not {kind(options)}")
        n = integer(body.get("n"), "n", 1, MAX_SIBLINGS) or 1
        prompts = read_prompts(body.get("prompt"))
        if n * len(prompts) > MAX_SIBLINGS:
            raise bad(f"{len(prompts)} prompts of n={n} each are more than {MAX_SIBLINGS} replies")
        logprobs = body.get("logprobs")
        if logprobs is not None and not isinstance(logprobs, bool):
            integer(logprobs, "logprobs", 0, MAX_TOP_LOGPROBS)
        return CallRequest(
            dialect=self.name,
            model=model_name(body),
            messages=[],
            prompts=prompts,
            n=n,
            max_tokens=integer(body.get("max_tokens"), "max_tokens", 1, 2**31 - 1),
            stop=stops(body.get("stop")),
            stop_token_ids=token_ids(body.get("stop_token_ids")),
            stream=stream,
            include_usage=stream and options.get("include_usage") is True,
            logprobs=logprobs is not None and logprobs is not False,
            top_logprobs=int(logprobs or 0),
            ignored=ignored,
            labels=labels(body.get("metadata")),
            token_ids=flag(body, "return_token_ids"),
        )

    def reply(self, served: Served, request: CallRequest, exchange: Exchange) -> bytes:
        choices = []
        for r in exchange.records:
            text = (r.reply or {}).get("content") or ""
            choices.append(_choice(served, request, r.index, text, exchange.told(r), r.finish_reason))
        usage = _usage(request, exchange.records)
        return orjson.dumps({**_head(served, request, exchange), "choices": choices, "usage": usage})

    def stream(self, served: Served, request: CallRequest, exchange: Exchange) -> CompletionStream:
        return CompletionStream(served, request, exchange)

    def error(self, error: GatewayError) -> bytes:
        return error_body(error, "prompt")


class CompletionStream:
    """Chunks in the very shape of the whole; a choice's last one has its finish_reason."""

    def __init__(self, served: Served, request: CallRequest, exchange: Exchange) -> None:
        self._served = served
        self._request = request
        self._head = _head(served, request, exchange)
        self._offsets: dict[int, int] = {}
        """Length of the text of a choice's tokens that were told."""

    def said(self, said: Said) -> bytes:
        text = said.delta.content if said.delta else ""
        finish = said.record.finish_reason if said.record else None
        told = list(said.logprobs)
        offset = self._offsets.get(said.index, 0)
        self._offsets[said.index] = offset + len(self._served.tokens.text([t.token for t in told]))
        choice = _choice(self._served, self._request, said.index, text, told, finish, offset)
        usage = {"usage": None} if self._request.include_usage else {}
        return data_event({**self._head, "choices": [choice], **usage})

    def failed(self, error: GatewayError) -> bytes:
        return data_event({"error": error_object(error, "prompt")})

    def idle(self) -> bytes:
        return KEEP_ALIVE

    def done(self, records: list[CallRecord]) -> bytes:
        out = b""
        if self._request.include_usage:
            out = data_event({**self._head, "choices": [], "usage": _usage(self._request, records)})
        return out + b"data: [DONE]\n\n"


def read_prompts(raw: Any) -> tuple[Prompt, ...]:
    """Text, ids, or a list of either. Raises GatewayError (400)."""
    many = raw if isinstance(raw, list) and not all(type(t) is int for t in raw) else [raw]
    out: list[Prompt] = []
    for i, one in enumerate(many):
        where = "prompt" if len(many) == 1 else f"prompt[{i}]"
        if isinstance(one, list):
            one = token_ids(one, where)
        if not isinstance(one, str | tuple):
            raise bad(f"{where} must be text, token ids, or a list of them, not {kind(one)}")
        if not one:
            raise bad(f"{where} is empty; there is nothing to continue")
        out.append(one)
    return tuple(out)


def _head(served: Served, request: CallRequest, exchange: Exchange) -> dict[str, Any]:
    return {
        "id": f"cmpl-{exchange.exchange_id}",
        "object": "text_completion",
        "created": int(exchange.created),
        "model": request.model or served.model,
    }


def _choice(
    served: Served,
    request: CallRequest,
    index: int,
    text: str,
    told: list[Told],
    finish_reason: str | None,
    offset: int = 0,
) -> dict[str, Any]:
    ids = {"token_ids": [t.token for t in told]} if request.token_ids else {}
    logprobs = _logprobs(served, told, offset) if request.logprobs else None
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason, **ids}


def _logprobs(served: Served, told: Iterable[Told], offset: int) -> dict[str, Any]:
    """The schema of completions: columns. Offsets count from the reply's beginning.

    The likeliest are told by their text, as OpenAI does, the sampled token always among them; of two with one
    text (halves of characters) the likelier is told.
    """
    tokens, values, top, offsets = [], [], [], []
    for t in told:
        text = served.tokens.text([t.token])
        tokens.append(text)
        values.append(finite(t.logprob))
        likeliest = {served.tokens.text([token]): logprob for token, logprob in reversed(t.top)}
        top.append({**dict(reversed(likeliest.items())), text: finite(t.logprob)})
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def _usage(request: CallRequest, records: list[CallRecord]) -> dict[str, int]:
    """Each prompt is counted once, however many siblings it has."""
    prompt = sum(r.prompt_length for r in records if r.index % request.n == 0)
    output = sum(len(r.output_ids) for r in records)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
