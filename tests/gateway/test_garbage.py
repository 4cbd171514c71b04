"""A call leaves no circle of references: the collector of garbage is told to look seldom, for it stops the loop."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from gateway_support import Reply, Served, eventually, tool_call

from areal_agent.errors import EngineError
from areal_gateway import exchange

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS},
    "/v1/completions": {"prompt": "hi", "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}


@pytest.fixture
def garbage() -> Iterator[list[Any]]:
    """What only the collector could find; it keeps it for us to see."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.unfreeze()
    gc.collect()


def ours(found: list[Any]) -> Counter[str]:
    """Of it what the gateway made: its objects, and what runs its code."""
    out: Counter[str] = Counter()
    for x in found:
        code = next(
            (c for n in ("cr_code", "ag_code", "gi_code", "f_code") if (c := getattr(x, n, None))), None
        )
        where = code.co_filename if code is not None else type(x).__module__
        if isinstance(getattr(x, "__qualname__", None), str):
            where = str(getattr(x, "__module__", ""))
        if "areal_gateway" in where or "httptools" in where:
            out[f"{type(x).__qualname__} {getattr(x, '__qualname__', '')}"] += 1
    return out


async def turn(served: Served, key: str, path: str, body: dict[str, Any], status: bytes = b"200") -> None:
    """Over a connection of its own, and with no client's library: theirs leave circles."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(raw)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
    writer.write(head.encode() + raw)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 " + status)
    end = b"0\r\n\r\n" if body.get("stream") and status == b"200" else b"}"
    await reader.readuntil(end)
    writer.close()
    await asyncio.sleep(0.05)


async def again(lived: Callable[[], Awaitable[None]], garbage: list[Any]) -> None:
    """Assert that it leaves nothing, but for what it makes the first time."""
    await lived()
    gc.freeze()  # whatever was there, of other tests as well, is not looked at
    garbage.clear()
    for _ in range(3):
        await lived()
    await asyncio.sleep(0.05)
    gc.collect()
    assert not ours(garbage)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ASKED)
async def test_a_call_leaves_no_garbage(served: Served, path: str, stream: bool, garbage: list[Any]) -> None:
    served.fleet.rule = lambda _: Reply("so " * 20 + tool_call(), chunk=3)
    session = await served.open()
    await again(lambda: turn(served, session["api_key"], path, ASKED[path] | {"stream": stream}), garbage)


async def test_nor_does_a_session_that_is_sealed(served: Served, garbage: list[Any]) -> None:
    async def lived() -> None:
        session = await served.open()
        for _ in range(2):
            await turn(served, session["api_key"], "/v1/messages", ASKED["/v1/messages"])
        await served.seal(session, reward=1.0)

    await again(lived, garbage)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("chunk", [1, 100], ids=["late", "at once"])
async def test_nor_does_one_that_fails(served: Served, stream: bool, chunk: int, garbage: list[Any]) -> None:
    """It is kept, with its error, for a client that asks again; of what was worked with nothing is."""
    text = "so " * 20 if chunk == 1 else ""
    served.fleet.rule = lambda _: Reply(
        text, chunk=chunk, delay_s=0.005, error=EngineError("it broke"), finish=None
    )
    status = b"200" if stream and text else b"503"

    async def lived() -> None:
        session = await served.open()
        for path, body in ASKED.items():
            await turn(served, session["api_key"], path, body | {"stream": stream}, status)
        (kept,) = [s for s in served.gateway.sessions.running() if s.id == session["session_id"]]
        for exchanges in kept.exchanges.values():
            assert exchanges[0].error is not None
            assert exchanges[0].error.__traceback__ is None
        await served.seal(session)

    await again(lived, garbage)


@pytest.mark.parametrize("patient", [False, True], ids=["for good", "to come again"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_nor_does_one_whose_client_leaves(
    served: Served, stream: bool, patient: bool, garbage: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that fails while its client is away, so that nobody is told."""
    monkeypatch.setattr(exchange, "RETRY_GRACE_S", 0.3)
    served.fleet.rule = lambda _: Reply(
        "", delay_s=0.1, error=EngineError("it broke"), finish=None, gate=Late()
    )

    async def lived() -> None:
        session = await served.open()
        body = json.dumps(ASKED["/v1/messages"] | {"stream": stream}).encode()
        head = f"POST /v1/messages HTTP/1.1\r\nHost: here\r\nx-api-key: {session['api_key']}\r\n"
        head += "x-stainless-retry-count: 0\r\n" if patient else ""
        _, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
        asked = len(served.fleet.asked)
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        await eventually(lambda: len(served.fleet.asked) > asked)
        writer.close()
        (left,) = [s for s in served.gateway.sessions.running() if s.id == session["session_id"]]
        await eventually(lambda: not left.running)
        ((ended,),) = left.exchanges.values()
        assert ended.error is not None
        assert (ended.error.code, ended.error.__traceback__) == (
            "engine_error" if patient else "client_left",
            None,
        )
        await served.seal(session)

    await again(lived, garbage)


class Late(asyncio.Event):
    """A gate that opens by itself."""

    async def wait(self) -> Any:
        await asyncio.sleep(0.1)
