"""One engine as its HTTP server sees us: token ids in, token ids out, and the control calls.

Invariant: a reply either ends with a chunk that has a finish reason and spans over every output token, or
raises; a reply that was cut is never taken for a whole one. Every request has a deadline.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from areal_agent.errors import EngineError
from areal_gateway.fleet.types import Chunk, EngineSampling, Span

KEEPALIVE_S = 2.0
"""vLLM's server closes idle connections after 5 s; a pooled one must be dropped earlier than that."""

CONNECT_S = 5.0
FINISH_REASONS = ("stop", "length", "abort")

MASKED = -9999.0
"""vLLM writes a logprob of minus infinity as this; a sampled token cannot have it."""


class EngineLost(EngineError):
    """The connection failed or was cut, or a reply failed by the engine's fault (a status of 500 or more):
    the engine died, or is about to be found dead."""


class EngineTimedOut(EngineError):
    """A reply was not whole in time: the engine is busy, or paused. It lives."""


class EngineRefused(EngineError):
    """The engine answered with an error; it lives, and the same request would be refused again.

    Attributes:
        status: HTTP status of the answer, or the code of an error inside a stream: vLLM streams even a
            prompt that is too long (400) as an event of a 200. For a reply it is below 500.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class EngineClient:
    """HTTP client of one vLLM server, with a connection pool of its own."""

    def __init__(self, url: str, model: str | None) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._session: aiohttp.ClientSession | None = None
        self._replies: set[aiohttp.ClientResponse] = set()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
                json_serialize=lambda body: orjson.dumps(body).decode(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        return self._session

    async def close(self) -> None:
        """Close every connection; calls in flight are cut and end as EngineLost."""
        session, self._session = self._session, None
        # Closing the session alone would leave their readers waiting for a byte that never comes.
        for response in self._replies:
            response.content.set_exception(aiohttp.ClientConnectionError("cut by us"))
            response.close()
        if session is not None:
            await session.close()

    # generation

    async def generate(
        self, prompt_ids: list[int], sampling: EngineSampling, timeout_s: float
    ) -> AsyncGenerator[Chunk]:
        """Stream one reply. Closing the iterator closes the request, and the engine drops the work.

        Raises:
            EngineLost: connection failed, the stream ended early, or the engine failed (500 or more).
            EngineRefused: the engine refused the request.
            EngineTimedOut: it took longer than `timeout_s`.
            EngineError: it broke the protocol.
        """
        body = {
            "model": self.model,
            "token_ids": prompt_ids,
            "sampling_params": sampling_params(sampling),
            "stream": True,
        }
        reader = _ReplyReader(self.url, sampling.top_logprobs)
        try:
            # Not asyncio.timeout: it would cancel the consumer while this generator is suspended.
            async with await self._open(body, timeout_s) as response, self._cuttable(response):
                if response.status != 200:
                    raise _failure(
                        f"engine {self.url} answered {response.status}: {await _error_text(response)}",
                        response.status,
                    )
                async for data in _events(response):
                    if (chunk := reader.read(data)) is not None:
                        yield chunk
        except TimeoutError:
            raise EngineTimedOut(
                f"engine {self.url} had not finished the reply after {timeout_s:.0f} s "
                f"({reader.n} tokens came); raise fleet.call_timeout_s or lower max_tokens"
            ) from None
        except (aiohttp.ClientError, OSError, RuntimeError) as e:
            # RuntimeError: the session was closed under us, as quarantine does.
            raise EngineLost(f"engine {self.url} was lost after {reader.n} tokens of a reply: {e!r}") from e
        if not reader.done:
            raise EngineLost(f"engine {self.url} cut a reply after {reader.n} tokens")

    async def _open(self, body: dict[str, Any], timeout_s: float) -> aiohttp.ClientResponse:
        """POST the request; once more where a pooled connection turned out to be closed (no byte came)."""
        url = f"{self.url}/inference/v1/generate"
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        try:
            return await self.session.post(url, json=body, timeout=timeout)
        except (aiohttp.ServerDisconnectedError, ConnectionResetError):
            return await self.session.post(url, json=body, timeout=timeout)

    @asynccontextmanager
    async def _cuttable(self, response: aiohttp.ClientResponse) -> AsyncIterator[None]:
        self._replies.add(response)
        try:
            yield
        finally:
            self._replies.discard(response)

    # control

    async def health(self, timeout_s: float) -> None:
        await self._call("GET", "/health", timeout_s)

    async def model_name(self, timeout_s: float) -> str:
        """The first model the server lists."""
        try:
            return str((await self._call("GET", "/v1/models", timeout_s))["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as e:
            raise EngineError(f"engine {self.url} lists no model") from e

    async def world_size(self, timeout_s: float) -> int:
        """Workers (ranks) of this engine."""
        return int((await self._call("GET", "/get_world_size", timeout_s))["world_size"])

    async def pause(self, timeout_s: float) -> None:
        """Freeze decoding; requests in flight stay."""
        await self._call("POST", "/pause", timeout_s, params={"mode": "keep"})

    async def resume(self, timeout_s: float) -> None:
        await self._call("POST", "/resume", timeout_s)

    async def set_label(self, version: int, timeout_s: float) -> None:
        await self._call("POST", "/update_weight_version", timeout_s, json={"new_version": str(version)})

    async def label(self, timeout_s: float) -> str:
        return str((await self._call("GET", "/weight_info", timeout_s))["weight_version"])

    async def rpc(self, method: str, arg: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Call a method of the worker extension; one result per worker. Raises EngineError for {error}."""
        body = {"method": method, "args": [json.dumps(arg)], "timeout": timeout_s}
        results = (await self._call("POST", "/collective_rpc", timeout_s, json=body))["results"]
        for i, result in enumerate(results):
            if isinstance(result, dict) and result.get("error") and "phase" not in result:
                raise EngineError(f"engine {self.url} worker {i}, {method}: {result['error']}")
        return results

    async def _call(self, verb: str, path: str, timeout_s: float, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self.session.request(verb, self.url + path, **kwargs) as response,
            ):
                if response.status != 200:
                    raise EngineRefused(
                        f"engine {self.url}{path} answered {response.status}: {await _error_text(response)}",
                        response.status,
                    )
                data = await response.read()
                return orjson.loads(data) if data else None
        except TimeoutError:
            waited = time.monotonic() - began
            raise EngineError(f"engine {self.url}{path} did not answer within {waited:.1f} s") from None
        except (aiohttp.ClientError, OSError, RuntimeError) as e:
            raise EngineLost(f"engine {self.url}{path} cannot be reached: {e!r}") from e
        except orjson.JSONDecodeError as e:
            raise EngineError(f"engine {self.url}{path} answered something that is not JSON: {e}") from e


def _failure(message: str, status: int) -> EngineError:
    """Of a reply. vLLM catches what its dying core raises, and answers or streams it as an error of its own."""
    return EngineLost(message) if status >= 500 else EngineRefused(message, status)


def sampling_params(s: EngineSampling) -> dict[str, Any]:
    """EngineSampling -> vLLM's sampling_params. `logprobs: 0` asks for the sampled token's own.

    vLLM's k entries count the sampled token, wherever it ranks: one more makes sure that the likeliest k are there.
    """
    params = dict(s.extra)
    params |= {
        "max_tokens": s.max_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "logprobs": s.top_logprobs + 1 if s.top_logprobs else 0,
        "detokenize": bool(s.stop),
    }
    if s.stop:
        params["stop"] = s.stop
    if s.stop_token_ids:
        params["stop_token_ids"] = s.stop_token_ids
    if s.seed is not None:
        params["seed"] = s.seed
    return params


class _ReplyReader:
    """Turns the engine's events into chunks and checks them against the invariant of types.py."""

    def __init__(self, url: str, top: int = 0) -> None:
        self.url = url
        self.top = top
        self.n = 0
        self.done = False

    def read(self, data: bytes) -> Chunk | None:
        if data == b"[DONE]":
            return None
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as e:
            raise EngineError(f"engine {self.url} sent an event that is not JSON: {data[:200]!r}") from e
        if error := event.get("error"):
            told = error if isinstance(error, dict) else {"message": error}
            code = told.get("code")
            raise _failure(
                f"engine {self.url} failed after {self.n} tokens of a reply: {told.get('message')}",
                code if isinstance(code, int) else 500,
            )
        if not event.get("choices"):
            return None
        choice = event["choices"][0]
        ids = choice.get("token_ids") or []
        self.n += len(ids)
        finish, spans = choice.get("finish_reason"), None
        if finish is not None:
            if finish not in FINISH_REASONS:
                raise EngineError(f"engine {self.url} ended a reply with finish_reason {finish!r}")
            spans = self._spans(choice.get("weight_versions") or [])
            self.done = True
        raw = choice.get("logprobs")
        return Chunk(ids, _logprobs(ids, raw), finish, spans, _top(ids, raw, self.top) if self.top else None)

    def _spans(self, raw: list[dict[str, Any]]) -> list[Span]:
        spans: list[Span] = []
        at = 0
        for span in raw:
            try:
                version = int(span["version"])
            except ValueError:
                raise EngineError(
                    f"engine {self.url} stamps version {span['version']!r}, not a number: it was never given one"
                ) from None
            if span["start"] != at or span["end"] <= at:
                break
            at = span["end"]
            if spans and spans[-1][2] == version:
                spans[-1] = (spans[-1][0], at, version)
            else:
                spans.append((span["start"], at, version))
        if at != self.n:
            raise EngineError(f"engine {self.url} gave spans {raw} for {self.n} tokens")
        return spans


def _logprobs(ids: list[int], raw: dict[str, Any] | None) -> list[float | None]:
    """One per id; None where the engine gave none, or gave another token's."""
    content = (raw or {}).get("content") or []
    if len(content) != len(ids):
        return [None] * len(ids)
    out: list[float | None] = []
    for token, entry in zip(ids, content, strict=True):
        value = entry.get("logprob") if entry and entry.get("token_id") == token else None
        out.append(value if value is not None and math.isfinite(value) and value > MASKED else None)
    return out


def _top(ids: list[int], raw: dict[str, Any] | None, k: int) -> list[list[tuple[int, float]]]:
    """The likeliest `k` at each position, those of probability 0 left out; none where the engine told none."""
    content = (raw or {}).get("content") or []
    out: list[list[tuple[int, float]]] = []
    for i in range(len(ids)):
        entries = (content[i] if i < len(content) else None) or {}
        found = [(int(e["token_id"]), float(e["logprob"])) for e in entries.get("top_logprobs") or ()]
        likely = sorted((e for e in found if e[1] > MASKED), key=lambda e: -e[1])
        out.append(likely[:k])
    return out


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The `data:` payloads of a server-sent event stream."""
    buffer = bytearray()
    async for piece in response.content.iter_any():
        buffer += piece
        while (end := buffer.find(b"\n\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 2]
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _error_text(response: aiohttp.ClientResponse) -> str:
    text = (await response.text(errors="replace"))[:2000]
    try:
        error = orjson.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return text.strip() or response.reason or "no reason given"
