"""One streamed reply of a vLLM server, event by event, from either of its token endpoints.

Invariant: the pieces of a reply that ended are all of its tokens, each with its own logprob or None; a stream
that stops without a finish reason is an EngineLost, never a reply.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from areal_agent.errors import EngineError
from areal_gateway.fleet.event import (
    Choice,
    Event,
    Reader,
    Top,
    logprobs_of,
    read_events,
    reader,
    said_of,
    top_of,
)
from areal_gateway.fleet.http import EngineHTTP, error_text, events
from areal_gateway.fleet.protocol import EngineLost, EngineRefused, EngineTimedOut
from areal_gateway.fleet.types import EngineSampling
from areal_gateway.turns import turns

MANY = 8
"""Events that came at once are read in a turn of the event loop when they are more."""

DONE = b"[DONE]"

FINISH_REASONS = ("stop", "length", "abort")


@dataclass(slots=True)
class Piece:
    """What came at once, of one event or several: `token_ids` [n], `logprobs` [n], the finish reason on the last,
    with it the engine's word on the versions.

    `top` [n], where it was asked for: (token id, logprob) of the likeliest tokens, the likeliest first.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    finish_reason: str | None
    weight_versions: list[dict[str, Any]]
    top: Top | None = None


async def pieces(
    http: EngineHTTP, path: str, body: dict[str, Any], timeout_s: float, top: int = 0
) -> AsyncGenerator[Piece]:
    """Stream the reply to `body`, with the `top` likeliest tokens. Raises as EngineDriver.generate does."""
    n, done = 0, False
    read = reader(path, top=bool(top))
    try:
        # Not asyncio.timeout: it would cancel the consumer while this generator is suspended.
        async with http.streams.post(
            path, orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), timeout_s
        ) as reply:
            if reply.status != 200:
                said = error_text(await reply.text(), reply.status)
                raise _failure(f"engine {http.url} answered {reply.status}: {said}", reply.status)
            async for batch in events(reply):
                if len(batch) > MANY:
                    await turns().turn()
                piece, fault = _piece(http.url, read, batch, n, top)
                if piece is not None:
                    n += len(piece.token_ids)
                    done = done or piece.finish_reason is not None
                    yield piece
                if fault is not None:
                    raise fault
    except TimeoutError:
        raise EngineTimedOut(
            f"engine {http.url} had not finished the reply after {timeout_s:.0f} s "
            f"({n} tokens came); raise fleet.call_timeout_s or lower max_tokens"
        ) from None
    except OSError as e:
        raise EngineLost(f"engine {http.url} was lost after {n} tokens of a reply: {e!r}") from e
    if not done:
        raise EngineLost(f"engine {http.url} cut a reply after {n} tokens")


def _piece(
    url: str, read: Reader, batch: list[bytes], n: int, top: int
) -> tuple[Piece | None, EngineError | None]:
    """What some events say after `n` tokens, and the error that one of them is: what came before it counts.

    An engine under load and a gateway that is busy have several waiting; on its way up one piece of them
    costs what one event does.
    """
    piece: Piece | None = None
    said: list[Any] = []
    read_so_far, unreadable = read_events(read, [data for data in batch if data != DONE])
    fault: EngineError | None = None
    if unreadable is not None:
        data, why = unreadable
        fault = EngineError(f"engine {url} sent an event that cannot be read ({why}): {data[:200]!r}")
    for event in read_so_far:
        try:
            choice = _choice(url, event, n)
        except EngineError as e:
            fault = e
            break
        if choice is None:
            continue
        if piece is None:
            piece = Piece([], [], None, [], [] if top else None)
        ids = choice.token_ids or []
        n += len(ids)
        piece.token_ids += ids
        said += said_of(choice)
        if piece.top is not None:
            piece.top += top_of(choice, ids, top)
        if choice.finish_reason is not None:
            piece.finish_reason = choice.finish_reason
            piece.weight_versions = choice.weight_versions or []
    if piece is not None:
        piece.logprobs = logprobs_of(said, piece.token_ids)
    return piece, fault


def _choice(url: str, event: Event, n: int) -> Choice | None:
    if error := event.error:
        told = error if isinstance(error, dict) else {"message": error}
        code = told.get("code")
        raise _failure(
            f"engine {url} failed after {n} tokens of a reply: {told.get('message')}",
            code if isinstance(code, int) else 500,
        )
    if not event.choices:
        return None
    choice = event.choices[0]
    if choice.finish_reason is not None and choice.finish_reason not in FINISH_REASONS:
        raise EngineError(f"engine {url} ended a reply with finish_reason {choice.finish_reason!r}")
    return choice


def _failure(message: str, status: int) -> EngineError:
    """Of a reply. vLLM catches what its dying core raises, and answers or streams it as an error of its own."""
    return EngineLost(message) if status >= 500 else EngineRefused(message, status)


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
    model: str | None, prompt_ids: Sequence[int], s: EngineSampling, request_id: str
) -> dict[str, Any]:
    """A request to GENERATE."""
    params = sampling_params(s) | {"detokenize": bool(s.stop)}
    return {
        "model": model,
        "request_id": request_id,
        "token_ids": _numbers(prompt_ids),
        "sampling_params": params,
        "stream": True,
    }


def completions_body(model: str | None, prompt_ids: Sequence[int], s: EngineSampling) -> dict[str, Any]:
    """A request to COMPLETIONS, which gives token ids on request."""
    asked = {"model": model, "prompt": _numbers(prompt_ids), "stream": True, "return_token_ids": True}
    if s.top_logprobs:
        asked["return_tokens_as_token_ids"] = True
    return sampling_params(s) | asked


def _numbers(ids: Sequence[int]) -> np.ndarray:
    """[n] int32, which is written as JSON without an object for each id."""
    return np.asarray(ids, dtype=np.int32)
