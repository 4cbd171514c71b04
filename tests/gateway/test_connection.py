"""Our own connections, against aiohttp's as the oracle: whatever a client sends, and however it comes in pieces, the
answers are those that aiohttp alone gives."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import hashlib
import inspect
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httptools
import orjson
import pytest
import uvloop
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_gateway import connection
from areal_gateway.connection import Connection, Connections
from areal_gateway.plain import Request

LIMIT = 2000
Answer = tuple[int, bytes]


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Production runs on uvloop, or where there is none on asyncio's loop; their transports differ."""

    def each(run: Callable[[Any], Any], **arguments: Any) -> None:
        run(test(**arguments))

    each.__name__, each.__doc__, each.__module__ = test.__name__, test.__doc__, test.__module__
    parameters = inspect.signature(test).parameters.values()
    ours = inspect.Parameter("run", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    each.__signature__ = inspect.Signature([ours, *parameters])  # type: ignore[attr-defined]
    return pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])(each)


def described(key: str | None, tag: str | None, body: bytes) -> bytes:
    return orjson.dumps([key, ascii(tag), len(body), hashlib.sha256(body).hexdigest()])


async def echo(request: Request) -> None:
    body = described(request.match_info.get("key"), request.headers.get("X-Tag"), await request.read())
    await request.answer(200, {"Content-Type": "application/json"}, body)


async def aiohttp_echo(request: web.Request) -> web.Response:
    body = await request.read()
    return web.Response(body=described(request.match_info.get("key"), request.headers.get("X-Tag"), body))


@dataclass
class Sides:
    ours: int
    theirs: int
    connections: Connections
    handed_over: list[Any]


@asynccontextmanager
async def serving(**more: Callable[[Request], Awaitable[None]]) -> AsyncIterator[Sides]:
    """`POST /echo`, and /s/KEY/echo, on our connections and on aiohttp's; of ours also POST /NAME for every `more`."""
    app = web.Application(client_max_size=LIMIT)
    for path in ("/echo", "/s/{key}/echo", "/chunked"):
        app.router.add_post(path, aiohttp_echo)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    other: Any = runner.server
    connections = Connections()
    handed_over: list[Any] = []

    def handed() -> Any:
        handed_over.append(other())
        return handed_over[-1]

    routes = {"POST /echo": echo} | {f"POST /{name}": handler for name, handler in more.items()}
    loop = asyncio.get_running_loop()
    ours = await loop.create_server(lambda: Connection(routes, LIMIT, handed, connections), "127.0.0.1", 0)
    theirs = await loop.create_server(other, "127.0.0.1", 0)
    try:
        yield Sides(
            ours.sockets[0].getsockname()[1], theirs.sockets[0].getsockname()[1], connections, handed_over
        )
    finally:
        ours.close()
        theirs.close()
        for c in list(connections.open):
            c.abort()
        await runner.cleanup()


class Answers:
    """What came back, read by a parser of the other side of HTTP."""

    def __init__(self) -> None:
        self.all: list[Answer] = []
        self.parser = httptools.HttpResponseParser(self)
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() >= 200:
            self.all.append((self.parser.get_status_code(), self._body))
        self._body = b""


async def ask(port: int, pieces: list[bytes]) -> list[Answer]:
    """The answers to bytes whose last request asks for the connection's end."""
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        answers = Answers()
        while data := await reader.read(2**16):
            answers.parser.feed_data(data)
        writer.close()
    return answers.all


def post(path: str, body: bytes, *headers: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: here", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body


def chunked(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n"


bodies = st.binary(max_size=300)
requests = st.one_of(
    st.builds(post, st.sampled_from(["/echo", "/s/abc/echo", "/s/a-b_c/echo"]), bodies),
    st.builds(
        post,
        st.just("/echo"),
        bodies,
        st.sampled_from(
            [
                "X-Tag: one",
                "x-tag:  two ",
                "X-TAG: \u00e9",
                "X-Tag: \udcff",
                "X-Tag:",
                "Connection: keep-alive",
                "Accept: a\r\nAccept: b",
                "X-Tag: 1\r\nX-TAG: 2",
                "X-Tag: " + "t" * 8000,
            ]
        ),
    ),
    st.builds(
        post,
        st.sampled_from(
            [
                "/",
                "/echo/",
                "/echo?a=1",
                "/ec%68o",
                "/s//echo",
                "/s/a%20b/echo",
                "/s/a?b/echo",
                "/s/{a}/echo",
                "/s/a/s/b/echo",
                "/s/x",
            ]
        ),
        bodies,
    ),
    st.builds(chunked, st.sampled_from(["/echo", "/chunked"]), bodies),
    st.builds(lambda b: post("/echo", gzip.compress(b), "Content-Encoding: gzip"), bodies),
    st.just(b"GET /echo HTTP/1.1\r\nHost: here\r\n\r\n"),
    st.just(b"PUT /echo HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\n\r\nhi"),
)
LAST = post("/echo", b"the last", "Connection: close")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_requests_in_any_pieces_are_answered_as_by_aiohttp_alone(
    run: Callable[[Any], Any], data: st.DataObject
) -> None:
    sent = b"".join(data.draw(st.lists(requests, max_size=5))) + LAST
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=6)))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True) if a < b]

    async def both() -> tuple[list[Answer], list[Answer]]:
        async with serving() as sides:
            return await ask(sides.ours, pieces), await ask(sides.theirs, [sent])

    ours, theirs = run(both())
    assert ours == theirs
    assert ours[-1] == (200, described(None, None, b"the last"))


@on_both_loops
async def test_byte_by_byte() -> None:
    sent = post("/echo", b"one") + post("/s/k/echo", b"two", "X-Tag: t") + LAST
    async with serving() as sides:
        answers = await ask(sides.ours, [bytes([b]) for b in sent])
        assert not sides.handed_over
    assert answers == [
        (200, described(None, None, b"one")),
        (200, described("k", "t", b"two")),
        (200, described(None, None, b"the last")),
    ]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (
            b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
            400,
        ),
        (b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: +3\r\n\r\nabc", 400),
        (b"POST /echo HTTP/1.1\r\nHost: h\r\nX bad: 3\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 400),
        (b"POST /echo HTTP/1.1\r\nHost: h\r\nHost: i\r\nContent-Length: 3\r\n\r\nabc", 400),
        (b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\nabc\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nHost: h\r\n" + b"X: 1\r\n" * 200 + b"Content-Length: 0\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"nonsense\n", 400),
        (b"GET /echo HTTP/1.1\nHost: h\n\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nHost: h\r\nX-Long: " + b"x" * 9000 + b"\r\n\r\n", 400),
    ],
    ids=lambda v: v[:60].decode("latin-1") if isinstance(v, bytes) else str(v),
)
@on_both_loops
async def test_what_is_broken_is_refused_once_and_nothing_after_it_is_done(sent: bytes, status: int) -> None:
    async with serving() as sides:
        for after in (b"", post("/echo", b"smuggled")):
            answers = await ask(sides.ours, [sent + after])
            assert answers == await ask(sides.theirs, [sent + after])
            assert [s for s, _ in answers] == [status]


@pytest.mark.parametrize(
    "sent",
    [
        post("/echo", b"x" * (LIMIT + 1), "Connection: close"),
        post("/echo", gzip.compress(b"x" * 10 * LIMIT), "Content-Encoding: gzip", "Connection: close"),
    ],
    ids=["as it is", "unpacked"],
)
@on_both_loops
async def test_what_is_too_large_is_refused(sent: bytes) -> None:
    async with serving() as sides:
        answers = await ask(sides.ours, [sent])
    assert [s for s, _ in answers] == [413]


@on_both_loops
async def test_who_waits_for_100_continue_is_told_to() -> None:
    head = post("/echo", b"x" * 100, "Expect: 100-continue", "Connection: close")[:-100]
    async with serving() as sides, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", sides.ours)
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"x" * 100)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()


@on_both_loops
async def test_http_1_0_gets_an_answer_and_the_end() -> None:
    async with serving() as sides:
        old = b"POST /echo HTTP/1.0\r\nContent-Length: 2\r\n\r\nhi"
        assert await ask(sides.ours, [old]) == [(200, described(None, None, b"hi"))]


@on_both_loops
async def test_a_client_that_does_not_read_is_waited_for_and_then_gets_all() -> None:
    written = 0
    chunk = b"x" * 2**16

    async def much(request: Request) -> None:
        nonlocal written
        stream = request.stream({})
        for _ in range(400):
            await stream.write(chunk)
            written += 1
        await stream.write_eof(b"end")

    async with serving(much=much) as sides, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", sides.ours, limit=2**10)
        writer.write(post("/much", b"", "Connection: close"))
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.1)
        assert 0 < written < 400  # the rest is not in memory
        answers = Answers()
        while data := await reader.read(2**20):
            answers.parser.feed_data(data)
        assert answers.all == [(200, chunk * 400 + b"end")]
        writer.close()


@on_both_loops
async def test_who_leaves_while_it_is_waited_for_ends_the_work() -> None:
    ended = asyncio.Event()

    async def much(request: Request) -> None:
        stream = request.stream({})
        try:
            while True:
                await stream.write(b"x" * 2**16)
        finally:
            ended.set()

    async with serving(much=much) as sides, asyncio.timeout(10):
        _, writer = await asyncio.open_connection("127.0.0.1", sides.ours, limit=2**10)
        writer.write(post("/much", b""))
        await asyncio.sleep(0.2)
        writer.transport.abort()
        await ended.wait()
        await asyncio.sleep(0)
        assert not sides.connections.open


@on_both_loops
async def test_what_a_client_sends_ahead_is_not_all_taken_in() -> None:
    go = asyncio.Event()

    async def held(request: Request) -> None:
        await go.wait()
        await request.answer(200, {}, b"held")

    ahead = post("/echo", b"y" * LIMIT) * 4000  # 8 MB, more than buffers between two sockets take
    async with serving(held=held) as sides, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", sides.ours)
        writer.write(post("/held", b"") + ahead + LAST)
        while True:
            size = writer.transport.get_write_buffer_size()  # type: ignore[attr-defined]
            await asyncio.sleep(0.2)
            if size == writer.transport.get_write_buffer_size():  # type: ignore[attr-defined]
                break
        (ours,) = sides.connections.open
        assert ours._size < connection.READ_AHEAD + 2**20 < len(ahead)
        go.set()
        answers = Answers()
        while data := await reader.read(2**20):
            answers.parser.feed_data(data)
        writer.close()
    assert answers.all[0] == (200, b"held")
    assert answers.all[1:-1] == [(200, described(None, None, b"y" * LIMIT))] * 4000


@pytest.mark.parametrize("sent", [b"", b"POST /echo HT", post("/echo", b"abc")[:-1]])
@on_both_loops
async def test_a_client_that_says_nothing_more_is_let_go(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "IDLE_S", 0.3)
    async with serving() as sides, asyncio.timeout(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", sides.ours)
        writer.write(post("/echo", b"first") + sent)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


@on_both_loops
async def test_a_slow_answer_is_not_silence_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "IDLE_S", 0.5)

    async def slow(request: Request) -> None:
        await asyncio.sleep(1.5)  # three times as long as a client may be silent
        await request.answer(200, {}, b"slow")

    async with serving(slow=slow) as sides:
        assert await ask(sides.ours, [post("/slow", b"", "Connection: close")]) == [(200, b"slow")]


@on_both_loops
async def test_an_answer_that_breaks_off_ends_the_connection() -> None:
    async def broken(request: Request) -> None:
        await request.stream({}).write(b"half")
        raise RuntimeError("a fault of ours")

    async with serving(broken=broken) as sides, asyncio.timeout(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", sides.ours)
        writer.write(post("/broken", b"") + post("/echo", b"next"))
        said = await reader.read()
        assert said.endswith(b"4\r\nhalf\r\n")  # no end of it, and no other answer after it
        assert said.count(b"HTTP/1.1") == 1
        writer.close()


@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\nb", "a\rb"])
@on_both_loops
async def test_no_header_can_begin_another(value: str) -> None:
    refused: list[Exception] = []

    async def evil(request: Request) -> None:
        try:
            await request.answer(200, {"x-request-id": value}, b"")
        except ValueError as e:
            refused.append(e)
            await request.answer(200, {}, b"refused")

    async with serving(evil=evil) as sides:
        assert await ask(sides.ours, [post("/evil", b"", "Connection: close")]) == [(200, b"refused")]
    assert refused


@on_both_loops
async def test_what_was_not_read_goes_with_the_connection() -> None:
    """An upload that was broken off: nothing of it is left for the collector of garbage."""
    async with serving() as sides, asyncio.timeout(10):
        _, writer = await asyncio.open_connection("127.0.0.1", sides.ours)
        writer.write(post("/echo", b"x" * LIMIT)[:-1])
        while not sides.connections.open or not next(iter(sides.connections.open))._size:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        gone = weakref.ref(next(iter(sides.connections.open)))
        gc.disable()
        try:
            writer.transport.abort()
            while sides.connections.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert gone() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("begun", [False, True])
@on_both_loops
async def test_no_request_is_answered_after_the_connection_was_broken_off(begun: bool) -> None:
    asked = []

    async def broken(request: Request) -> None:
        asked.append("broken")
        if begun:
            await request.answer(200, {}, b"")
        raise RuntimeError("a fault of ours")

    async def after(request: Request) -> None:
        asked.append("after")

    async with serving(broken=broken, after=after) as sides:
        with contextlib.suppress(ConnectionResetError):
            await ask(sides.ours, [post("/broken", b"") + post("/after", b"")])
        await asyncio.sleep(0.05)
    assert asked == ["broken"]


@on_both_loops
async def test_a_server_that_stops_takes_no_new_connection() -> None:
    async with serving() as sides, asyncio.timeout(10):
        sides.connections.stopping = True
        reader, writer = await asyncio.open_connection("127.0.0.1", sides.ours)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert not sides.connections.open
