"""One streamed reply of a vLLM server, event by event, from either of its token endpoints.

Invariant: the pieces of a reply that ended are all of its tokens, each with its own logprob or None; a stream
that stops without a finish reason is an EngineLost, never a reply.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from areal_agent.errors import EngineError
from areal_gateway.fleet.http import EngineHTTP, error_text, events
from areal_gateway.fleet.protocol import EngineLost, EngineRefused, EngineTimedOut
from areal_gateway.fleet.types import EngineSampling

FINISH_REASONS = ("stop", "length", "abort")

MASKED = -9999.0
"""vLLM writes a logprob of minus infinity as this; a sampled token cannot have it."""

ID = "token_id:"
"""How completions spells a token id in place of the token's text."""

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"


Top = list[list[tuple[int, float]]]
"""For each token, the likeliest at its place: (token id, logprob)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """An event: `token_ids` [n], `logprobs` [n], the finish reason on the last, and the choice as it came.

    `top` [n], where it was asked for: (token id, logprob) of the likeliest tokens, the likeliest first.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    finish_reason: str | None
    choice: dict[str, Any]
    top: Top | None = None


async def pieces(
    http: EngineHTTP, path: str, body: dict[str, Any], timeout_s: float, top: int = 0
) -> AsyncGenerator[Piece]:
    """Stream the reply to `body`, with the `top` likeliest tokens. Raises as EngineDriver.generate does."""
    n, done = 0, False
    read_logprobs, read_top = _LOGPROBS[path], _TOP[path]
    try:
        # Not asyncio.timeout: it would cancel the consumer while this generator is suspended.
        async with http.stream(path, body, timeout_s) as response:
            if response.status != 200:
                raise _failure(
                    f"engine {http.url} answered {response.status}: {await error_text(response)}",
                    response.status,
                )
            async for data in events(response):
                if (choice := _choice(http.url, data, n)) is None:
                    continue
                ids = choice.get("token_ids") or []
                n += len(ids)
                finish = choice.get("finish_reason")
                if finish is not None and finish not in FINISH_REASONS:
                    raise EngineError(f"engine {http.url} ended a reply with finish_reason {finish!r}")
                done = done or finish is not None
                raw = choice.get("logprobs") or {}
                likeliest = read_top(ids, raw, top) if top else None
                yield Piece(ids, read_logprobs(ids, raw), finish, choice, likeliest)
    except TimeoutError:
        raise EngineTimedOut(
            f"engine {http.url} had not finished the reply after {timeout_s:.0f} s "
            f"({n} tokens came); raise fleet.call_timeout_s or lower max_tokens"
        ) from None
    except (aiohttp.ClientError, OSError, RuntimeError) as e:
        # RuntimeError: the session was closed under us, as quarantine does.
        raise EngineLost(f"engine {http.url} was lost after {n} tokens of a reply: {e!r}") from e
    if not done:
        raise EngineLost(f"engine {http.url} cut a reply after {n} tokens")


def _choice(url: str, data: bytes, n: int) -> dict[str, Any] | None:
    if data == b"[DONE]":
        return None
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError as e:
        raise EngineError(f"engine {url} sent an event that is not JSON: {data[:200]!r}") from e
    if error := event.get("error"):
        told = error if isinstance(error, dict) else {"message": error}
        code = told.get("code")
        raise _failure(
            f"engine {url} failed after {n} tokens of a reply: {told.get('message')}",
            code if isinstance(code, int) else 500,
        )
    return event["choices"][0] if event.get("choices") else None


def _failure(message: str, status: int) -> EngineError:
    """Of a reply. vLLM catches what its dying core raises, and answers or streams it as an error of its own."""
    return EngineLost(message) if status >= 500 else EngineRefused(message, status)


def _of_generate(ids: list[int], raw: dict[str, Any]) -> list[float | None]:
    """One per id; None where the engine gave none, or gave another token's."""
    content = raw.get("content") or []
    if len(content) != len(ids):
        return [None] * len(ids)
    # Written out: this runs for every token of every reply.
    return [
        p
        if e and e.get("token_id") == t and (p := e.get("logprob")) is not None and MASKED < p < math.inf
        else None
        for t, e in zip(ids, content, strict=True)
    ]


def _of_completions(ids: list[int], raw: dict[str, Any]) -> list[float | None]:
    """One per id. This shape names tokens by their text, so that only the count can be checked."""
    values = raw.get("token_logprobs") or []
    return [_sampled(v) for v in values] if len(values) == len(ids) else [None] * len(ids)


_LOGPROBS: dict[str, Callable[[list[int], dict[str, Any]], list[float | None]]] = {
    GENERATE: _of_generate,
    COMPLETIONS: _of_completions,
}


def _top_of_generate(ids: list[int], raw: dict[str, Any], k: int) -> Top:
    content = raw.get("content") or []
    entries = ((c or {}).get("top_logprobs") or () for c in content)
    found = [[(int(e["token_id"]), float(e["logprob"])) for e in at] for at in entries]
    return _likeliest(ids, found, k)


def _top_of_completions(ids: list[int], raw: dict[str, Any], k: int) -> Top:
    columns = raw.get("top_logprobs") or []
    found = [[(int(name.removeprefix(ID)), float(p)) for name, p in (at or {}).items()] for at in columns]
    return _likeliest(ids, found, k)


def _likeliest(ids: list[int], found: Top, k: int) -> Top:
    """The likeliest `k` at each place, those of probability 0 left out; none where the engine told none."""
    found = found if len(found) == len(ids) else [[] for _ in ids]
    return [sorted((e for e in at if e[1] > MASKED), key=lambda e: -e[1])[:k] for at in found]


_TOP: dict[str, Callable[[list[int], dict[str, Any], int], Top]] = {
    GENERATE: _top_of_generate,
    COMPLETIONS: _top_of_completions,
}


def _sampled(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and value > MASKED else None


def sampling_params(s: EngineSampling) -> dict[str, Any]:
    """EngineSampling in vLLM's words. `logprobs: 0` asks for the sampled token's own.

    vLLM's k entries count the sampled token, wherever it ranks: one more makes sure that the likeliest k are there.
    """
    params = dict(s.extra)
    params |= {
        "max_tokens": s.max_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "logprobs": s.top_logprobs + 1 if s.top_logprobs else 0,
    }
    if s.stop:
        params["stop"] = s.stop
    if s.stop_token_ids:
        params["stop_token_ids"] = s.stop_token_ids
    if s.seed is not None:
        params["seed"] = s.seed
    return params


def generate_body(
    model: str | None, prompt_ids: list[int], s: EngineSampling, request_id: str
) -> dict[str, Any]:
    """A request to GENERATE."""
    params = sampling_params(s) | {"detokenize": bool(s.stop)}
    return {
        "model": model,
        "request_id": request_id,
        "token_ids": prompt_ids,
        "sampling_params": params,
        "stream": True,
    }


def completions_body(model: str | None, prompt_ids: list[int], s: EngineSampling) -> dict[str, Any]:
    """A request to COMPLETIONS, which gives token ids on request."""
    asked = {"model": model, "prompt": prompt_ids, "stream": True, "return_token_ids": True}
    if s.top_logprobs:
        asked["return_tokens_as_token_ids"] = True
    return sampling_params(s) | asked
