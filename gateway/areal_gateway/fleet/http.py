"""HTTP to one vLLM server: a connection pool of its own, the control calls that every server answers, and
streams of events.

Invariant: every request has a deadline, and what the network does is told in the errors of protocol.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from http.client import responses
from typing import Any

import aiohttp
import orjson

from areal_agent.errors import EngineError
from areal_gateway.fleet.process import MODEL_NAME
from areal_gateway.fleet.protocol import EngineLost, EngineRefused
from areal_gateway.fleet.streams import Reply, Streams

KEEPALIVE_S = 2.0
"""vLLM's server closes idle connections after 5 s; a pooled one must be dropped earlier than that."""

CONNECT_S = 5.0


class EngineHTTP:
    """One server. `url` has no trailing slash; `model` is the name it serves, None until asked."""

    def __init__(self, url: str, model: str | None) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._session: aiohttp.ClientSession | None = None
        self.streams = Streams(self.url, connect_s=CONNECT_S, keep_s=KEEPALIVE_S)

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
        self.streams.close()
        if session is not None:
            await session.close()

    # control

    async def health(self, timeout_s: float) -> None:
        await self.call("GET", "/health", timeout_s)

    async def model_name(self, timeout_s: float) -> str:
        """The first model the server lists; where it has an adapter of our name, that."""
        try:
            names = [str(m["id"]) for m in (await self.call("GET", "/v1/models", timeout_s))["data"]]
            return MODEL_NAME if MODEL_NAME in names else names[0]
        except (KeyError, IndexError, TypeError) as e:
            raise EngineError(f"engine {self.url} lists no model") from e

    async def world_size(self, timeout_s: float) -> int:
        """Workers (ranks) of this engine."""
        return int((await self.call("GET", "/get_world_size", timeout_s))["world_size"])

    async def paths(self, timeout_s: float) -> frozenset[str]:
        """The paths it serves, as its own description of itself (OpenAPI) lists them."""
        try:
            return frozenset((await self.call("GET", "/openapi.json", timeout_s))["paths"])
        except (KeyError, TypeError) as e:
            raise EngineError(f"engine {self.url}/openapi.json lists no paths") from e

    async def rpc(self, method: str, arg: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Call a method of the worker extension; one result per worker. Raises EngineError for {error}."""
        body = {"method": method, "args": [json.dumps(arg)], "timeout": timeout_s}
        results = (await self.call("POST", "/collective_rpc", timeout_s, json=body))["results"]
        for i, result in enumerate(results):
            if isinstance(result, dict) and result.get("error") and "phase" not in result:
                raise EngineError(f"engine {self.url} worker {i}, {method}: {result['error']}")
        return results

    async def call(self, verb: str, path: str, timeout_s: float, **kwargs: Any) -> Any:
        """One request, its JSON answer. Raises EngineRefused, EngineLost, or EngineError when it is late."""
        began = time.monotonic()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self.session.request(verb, self.url + path, **kwargs) as response,
            ):
                if response.status != 200:
                    raise EngineRefused(
                        f"engine {self.url}{path} answered {response.status}: "
                        f"{error_text(await response.text(errors='replace'), response.status)}",
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


async def events(reply: Reply) -> AsyncIterator[list[bytes]]:
    """The `data:` payloads of a server-sent event stream, those together that came together."""
    rest = b""
    async for piece in reply.chunks():
        *whole, rest = (rest + piece if rest else piece).split(b"\n\n")
        if whole:
            yield [said[5:].strip() for e in whole if (said := e.lstrip(b"\n")).startswith(b"data:")]


def error_text(body: str, status: int) -> str:
    """What an answer that is an error says, in one line."""
    text = body[:2000]
    try:
        error = orjson.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return text.strip() or responses.get(status, "no reason given")
