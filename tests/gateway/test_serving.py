"""A gateway that stops: who waits is told, who is connected is let go."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from gateway_support import Reply, Served, eventually, make_app

from areal_gateway.tokens import Tokens


def sent(served: Served, key: str, stream: bool) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {key}\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_waits_when_it_stops_is_told_and_the_idle_are_let_go(
    tokens: Tokens, tmp_path: Path, stream: bool
) -> None:
    served = make_app(tokens, tmp_path)
    served.fleet.rule = lambda _: Reply("word " * 50, chunk=1, delay_s=0.2)
    await served.start()
    session = await served.open()
    port = served.server.port
    async with asyncio.timeout(10):
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", port)
        waiting, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent(served, session["api_key"], stream))
        await eventually(lambda: served.fleet.asked)
        if stream:
            await waiting.readuntil(b"data: ")
        stopping = asyncio.create_task(served.stop())
        said = await waiting.read()  # to the connection's end
        assert b"the gateway is stopping" in said
        assert stream or said.startswith(b"HTTP/1.1 503 ")
        assert await idle.read() == b""
        await stopping
        writer.close()
        idle_writer.close()


async def test_an_idle_connection_can_be_used_again_and_for_anything(served: Served) -> None:
    """A call, then aiohttp's, then a call: one connection."""
    session = await served.open()
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
        for request, status in [
            (sent(served, session["api_key"], False), b"200 OK"),
            (
                b"HEAD /v1/models HTTP/1.1\r\nHost: h\r\nx-api-key: %b\r\n\r\n" % session["api_key"].encode(),
                b"200 OK",
            ),
            (b"GET /v1/nothing HTTP/1.1\r\nHost: here\r\n\r\n", b"404 Not Found"),
            (sent(served, session["api_key"], False), b"200 OK"),
        ]:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 " + status)
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            if not request.startswith(b"HEAD"):
                await reader.readexactly(length)
        writer.close()
    assert len(served.fleet.asked) == 2


async def test_a_gateway_that_stops_starts_no_call(served: Served) -> None:
    """One that was being prepared when the others were told is told as well."""
    session = await served.open()
    served.gateway.stop_calls()
    status, _, body = await served.post(session, {"messages": [{"role": "user", "content": "hi"}]})
    assert (status, body["error"]["code"]) == (503, "stopping")
    assert served.fleet.asked == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("aiohttps", [False, True], ids=["ours", "aiohttp's"])
async def test_what_fails_after_an_answer_answers_no_second_time(
    served: Served, stream: bool, aiohttps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(served.gateway.sessions, "delivered", broken)
    session = await served.open()
    request = sent(served, session["api_key"], stream)
    if aiohttps:
        head, _, body = request.partition(b"\r\n\r\n")
        head = head.rpartition(b"\r\n")[0] + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
        request = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
        writer.write(request)
        said = await reader.read()  # to the connection's end
        writer.close()
    assert said.startswith(b"HTTP/1.1 200 OK")
    assert said.count(b"HTTP/1.1") == 1
    assert (b"aiohttp" in said) == aiohttps
