"""Streams of bytes: whole, broken off, late, left early; and connections that are used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from areal_gateway.fleet.streams import READ_AHEAD, StreamLost, Streams

Say = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Answers every request by `say`; what it heard, and over how many connections."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.heard: list[bytes] = []
        self.connections = 0
        self.gone = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self.heard.append(head + await reader.readexactly(length))
                await self.say(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone.set()
        finally:
            writer.close()


@asynccontextmanager
async def server(say: Say, keep_s: float = 10.0) -> AsyncIterator[tuple[Server, Streams]]:
    known = Server(say)
    listening = await asyncio.start_server(known.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/base"
    streams = Streams(url, connect_s=5.0, keep_s=keep_s)
    try:
        yield known, streams
    finally:
        streams.close()
        listening.close()


def chunked(*pieces: bytes, end: bool = True) -> Say:
    async def say(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)
        if end:
            writer.write(b"0\r\n\r\n")

    return say


def raw(data: bytes, close: bool = False) -> Say:
    async def say(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if close:
            await writer.drain()
            writer.close()

    return say


async def read(streams: Streams, body: bytes = b"{}", timeout_s: float = 5.0) -> tuple[int, bytes]:
    async with streams.post("/path", body, timeout_s) as reply:
        return reply.status, b"".join([c async for c in reply.chunks()])


@pytest.mark.parametrize(
    ("say", "status", "body"),
    [
        (chunked(b"one", b"two"), 200, b"onetwo"),
        (chunked(*[b"x" * 100_000] * 60), 200, b"x" * 6_000_000),
        (raw(b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy"), 503, b"busy"),
        (raw(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"), 200, b"ok"),
        (raw(b"HTTP/1.0 200 OK\r\n\r\nto the end", close=True), 200, b"to the end"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), 200, b""),
    ],
    ids=["chunked", "large", "of a length", "after a continue", "to the end of the connection", "empty"],
)
async def test_a_body_comes_whole(say: Say, status: int, body: bytes) -> None:
    async with server(say) as (known, streams):
        assert await read(streams, b'{"a": 1}') == (status, body)
        (heard,) = known.heard
        assert heard.startswith(b"POST /base/path HTTP/1.1\r\nHost: 127.0.0.1:")
        assert heard.endswith(b'\r\n\r\n{"a": 1}')


async def test_a_slow_reader_gets_everything_and_the_connection_waits_for_it() -> None:
    async with (
        server(chunked(*[b"y" * 1_000_000] * 12)) as (_, streams),
        streams.post("/", b"", 20.0) as reply,
    ):
        await asyncio.sleep(0.5)
        got = 0
        async for piece in reply.chunks():
            got += len(piece)
            await asyncio.sleep(0.02)
        assert got == 12_000_000


async def test_a_connection_is_used_again_and_not_when_it_lay_idle_for_long() -> None:
    async with server(chunked(b"one"), keep_s=0.2) as (known, streams):
        for _ in range(3):
            await read(streams)
        assert known.connections == 1
        await asyncio.sleep(0.3)
        await read(streams)
        assert known.connections == 2
        await asyncio.gather(*(read(streams) for _ in range(5)))
        assert known.connections == 6


async def test_a_pooled_connection_that_the_server_closed_costs_no_reply() -> None:
    """The server closes it just as it is used again: no byte came, so the request is sent once more."""

    async def say(writer: asyncio.StreamWriter) -> None:
        if len(known.heard) == 2:
            writer.close()
        else:
            await chunked(b"one")(writer)

    async with server(say) as (known, streams):
        await read(streams)
        assert await read(streams) == (200, b"one")
        assert (known.connections, len(known.heard)) == (2, 3)


@pytest.mark.parametrize(
    "say",
    [
        raw(b"", close=True),
        raw(b"HTTP/1.1 200 OK\r\nContent-Le", close=True),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", close=True),
        raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", close=True),
        raw(b"no HTTP at all\r\n\r\n"),
        raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
    ],
    ids=["nothing", "half a head", "half a body", "half of the chunks", "no HTTP", "no chunk"],
)
async def test_what_breaks_off_is_lost_and_is_asked_for_once(say: Say) -> None:
    async with server(say) as (known, streams):
        with pytest.raises(StreamLost):
            await read(streams)
        assert len(known.heard) == 1
        assert not streams._running


async def test_nobody_listens() -> None:
    async with server(chunked()) as (_, streams):
        pass
    with pytest.raises(ConnectionRefusedError):
        await read(streams)


async def test_a_deadline_ends_the_wait_for_the_head_and_for_the_body() -> None:
    for say in (raw(b""), chunked(b"one", end=False)):
        async with server(say) as (known, streams):
            with pytest.raises(TimeoutError):
                await read(streams, timeout_s=0.2)
            await asyncio.wait_for(known.gone.wait(), 5)


async def test_whoever_leaves_early_closes_the_connection() -> None:
    async with server(chunked(b"one", end=False)) as (known, streams):
        async with streams.post("/", b"", 60.0) as reply:
            assert await anext(aiter(reply.chunks())) == b"one"
        await asyncio.wait_for(known.gone.wait(), 5)
        known.gone.clear()
        task = asyncio.create_task(read(streams, timeout_s=60.0))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait_for(known.gone.wait(), 5)
        assert not streams._running


async def test_closing_cuts_whoever_reads() -> None:
    async with server(chunked(b"one", end=False)) as (known, streams):
        task = asyncio.create_task(read(streams, timeout_s=60.0))
        await asyncio.sleep(0.1)
        streams.close()
        with pytest.raises(StreamLost, match="cut by us"):
            await asyncio.wait_for(task, 5)
        await asyncio.wait_for(known.gone.wait(), 5)


@pytest.mark.parametrize(
    "pieces", [(b"first",), (b"x" * 1_000_000,) * 6], ids=["short", "more than is read ahead"]
)
async def test_what_nobody_read_is_never_part_of_the_next_reply(pieces: tuple[bytes, ...]) -> None:
    async def say(writer: asyncio.StreamWriter) -> None:
        await chunked(*(pieces if len(known.heard) == 1 else (b"second",)))(writer)

    async with server(say) as (known, streams):
        async with streams.post("/", b"", 20.0) as reply:
            while not reply.complete:
                await asyncio.sleep(0.02)
                if reply._waiting_bytes > READ_AHEAD:  # the connection waits for its reader
                    break
        assert await read(streams) == (200, b"second")


async def test_what_was_cut_is_not_asked_again() -> None:
    async def say(writer: asyncio.StreamWriter) -> None:
        if len(known.heard) == 1:
            await chunked(b"one")(writer)

    async with server(say) as (known, streams):
        await read(streams)
        task = asyncio.create_task(
            read(streams, timeout_s=60.0)
        )  # over the same connection, without an answer
        await asyncio.sleep(0.1)
        streams.close()
        with pytest.raises(StreamLost, match="cut by us"):
            await asyncio.wait_for(task, 5)
        assert (known.connections, len(known.heard)) == (1, 2)
        assert not streams._idle


async def test_the_urls_credentials_are_sent() -> None:
    async with server(chunked(b"one")) as (known, streams):
        url = f"http://user:p%40ss@127.0.0.1:{streams._port}"
        await read(Streams(url, connect_s=5.0, keep_s=1.0))
        assert b"\r\nAuthorization: Basic dXNlcjpwQHNz\r\n" in known.heard[0]
        assert b"\r\nHost: 127.0.0.1:" in known.heard[0]
