"""A client's connection, for as long as all it sends are an agent's requests in their plainest form; then aiohttp's.

Invariant: a request is either answered here, from its first byte to the last, or its first byte is the first that
aiohttp gets. Requests of one connection are answered in the order in which they came, one at a time.

Nearly all that an agent sends is a POST with a Content-Length to one of a few paths. aiohttp can do everything
that HTTP can, and needs a tenth of a short call's time, a quarter of a short stream's, to find out that this is
not asked for; whatever is not of this form (other paths and methods, chunked or compressed bodies, too large or
broken ones) is left to it, with all that comes after it on the same connection.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, cast

import httptools
from aiohttp import web
from multidict import CIMultiDict

log = logging.getLogger(__name__)

MAX_HEAD, MAX_HEADERS = 8190, 128
"""Longest head of a request that is read here, and most headers in it; aiohttp has these limits for each header."""

BEGINNINGS = b"POST ", b"GET "
"""Of what is read here."""

READ_AHEAD = 2**18
"""Bytes of requests to come that may wait while one is answered."""

IDLE_S = 3630.0
"""How long a connection may say nothing between requests or within one; as aiohttp: longer than any proxy."""

KEYED = re.compile(r"/s/([A-Za-z0-9_-]+)(/.+)")
"""A path with the key in it, for clients that cannot set one elsewhere, and the path without it."""

UNPLAIN = frozenset({"content-encoding", "expect", "sec-websocket-key1", "transfer-encoding", "upgrade"})
"""Headers of requests that are left to aiohttp."""

Handle = Callable[["Request"], Awaitable[None]]
"""Answers a request over its `answer` or `stream`."""


class Request:
    """A whole request: what handlers use of aiohttp's, by the same names.

    Attributes:
        route: method and path as declared, without a key.
        match_info: {"key": KEY} where the path has one.
        close: the client asks for the connection's end after the answer.
        begun: whether any of an answer was handed over: another would be read as a part of it.
    """

    __slots__ = ("_body", "_connection", "begun", "close", "headers", "match_info", "route")

    def __init__(
        self,
        connection: Connection,
        route: str,
        match_info: Mapping[str, str],
        headers: CIMultiDict[str],
        close: bool,
    ) -> None:
        self.route, self.match_info, self.headers, self.close = route, match_info, headers, close
        self.begun = False
        self._connection = connection
        self._body = b""

    @property
    def remote(self) -> str | None:
        return self._connection.remote

    async def read(self) -> bytes:
        return self._body

    def received(self, body: bytes) -> None:
        self._body = body

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """All of it at once. Raises ConnectionResetError: the client is gone."""
        head = _head(status, {**headers, "Content-Length": str(len(body))}, self.close)
        await self.send(head + body)

    def stream(self, headers: Mapping[str, str]) -> Stream:
        return Stream(self, headers)

    async def send(self, data: bytes) -> None:
        """Some of the answer, as it goes over the wire."""
        self.begun = True
        await self._connection.send(data)


class Stream:
    """A response of unknown length, as `aiohttp.web.StreamResponse`; its head goes with its first bytes."""

    __slots__ = ("_head", "_request", "prepared")

    def __init__(self, request: Request, headers: Mapping[str, str]) -> None:
        self.prepared = False
        self._request = request
        self._head = _head(200, {**headers, "Transfer-Encoding": "chunked"}, request.close)

    async def prepare(self, _: Request) -> None:
        self.prepared = True

    async def write(self, data: bytes) -> None:
        """Raises ConnectionResetError: the client is gone."""
        if data:  # an empty chunk would be the end
            await self._send(b"%x\r\n%b\r\n" % (len(data), data))

    async def write_eof(self, data: bytes = b"") -> None:
        last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        await self._send(last)

    async def _send(self, data: bytes) -> None:
        head, self._head = self._head, b""
        await self._request.send(head + data)


@dataclass
class Connections:
    """Those of one server: the open ones, and whether there are to be no more."""

    open: set[Connection] = field(default_factory=set)
    stopping: bool = False


class Connection(asyncio.Protocol):
    """`routes`: by method and path. `max_body`: of a request that is read here, in bytes. `other` makes aiohttp's
    protocol. `among` has those that are neither closed nor aiohttp's."""

    def __init__(
        self,
        routes: Mapping[str, Handle],
        max_body: int,
        other: Callable[[], asyncio.Protocol],
        among: Connections,
    ) -> None:
        self._routes, self._max_body, self._other, self._among = routes, max_body, other, among
        self._transport: asyncio.Transport | None = None
        self._chunks: list[bytes] = []
        """What came and was not read yet."""
        self._size = 0
        """Bytes of it."""
        self._needed = 1
        """Bytes that have to be there before it is worth a look."""
        self._request: tuple[Request, int, int] | None = None
        """One whose head was read, and where its body begins and ends."""
        self._task: asyncio.Task[None] | None = None
        self._ending = False
        self._writable: asyncio.Future[None] | None = None
        """There while more waits to be sent than the transport wants to hold."""
        self._heard = 0.0
        self._idle: asyncio.TimerHandle | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._among.stopping:
            self._transport.abort()
            return
        self._among.open.add(self)
        # Who vanished during a long call is found out.
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        loop = asyncio.get_running_loop()
        self._heard = loop.time()
        self._idle = loop.call_later(IDLE_S, self._look, loop)

    def data_received(self, data: bytes) -> None:
        self._heard = asyncio.get_running_loop().time()
        self._chunks.append(data)
        self._size += len(data)
        if self._task is None:
            self._read()
        elif self._size > READ_AHEAD and self._transport is not None:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed()
        if self._task is not None:
            self._task.cancel()
        self._wake()

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        self._wake()

    # ours

    @property
    def remote(self) -> str | None:
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return peer[0] if isinstance(peer, tuple) else None

    @property
    def task(self) -> asyncio.Task[None] | None:
        """What answers its request, if it has one."""
        return self._task

    async def send(self, data: bytes) -> None:
        """Hand it over, and wait while too much waits. Raises ConnectionResetError: there is no connection."""
        self._check()
        assert self._transport is not None
        self._transport.write(data)
        if self._writable is not None:
            await asyncio.shield(self._writable)  # the future is everybody's
        self._check()  # a write that fails closes the transport, and says nothing

    def _check(self) -> None:
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the client is gone")

    def end(self) -> None:
        """After the answer that is being given, if one is, else at once."""
        self._ending = True
        if self._task is None and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self._ending = True
        if self._transport is not None:
            self._transport.abort()

    def _read(self) -> None:
        """Go on with what came: begin to answer, wait for more, or leave it to aiohttp."""
        if self._size < self._needed or self._transport is None or self._ending:
            return
        data = b"".join(self._chunks) if len(self._chunks) > 1 else self._chunks[0]
        self._chunks = [data]
        if self._request is None:
            end = data.find(b"\r\n\r\n", 0, MAX_HEAD)
            if end < 0 and self._size < MAX_HEAD and _may_be_plain(data):
                self._needed = self._size + 1
                return
            self._request = _Head(self, data[: end + 4]).request(self._routes, self._max_body)
            if self._request is None:
                self._leave(data)
                return
        request, start, stop = self._request
        if self._size < stop:
            self._needed = stop
            return
        request.received(data[start:stop])
        rest = data[stop:]
        self._chunks, self._size, self._needed, self._request = [rest] if rest else [], len(rest), 1, None
        self._task = asyncio.get_running_loop().create_task(self._answer(request))

    async def _answer(self, request: Request) -> None:
        try:
            await self._routes[request.route](request)
        except ConnectionResetError:  # the client left while it was being answered; there is nobody to tell
            self.abort()
        except asyncio.CancelledError:  # the client left, or the gateway stops: the answer stays a part
            self.abort()
            raise
        except Exception:
            log.exception("%s failed", request.route)
            self.abort()
        finally:
            self._task = None
            self._heard = asyncio.get_running_loop().time()
        if request.close or self._ending:
            self.end()
        if self._transport is None or self._ending:
            return
        if self._size > READ_AHEAD:
            self._transport.resume_reading()
        if self._size:
            self._read()

    def _leave(self, data: bytes) -> None:
        """Make the connection aiohttp's, with all that was not read."""
        transport, self._transport = self._transport, None
        assert transport is not None
        self._closed()
        other = self._other()
        transport.set_protocol(other)
        other.connection_made(transport)
        other.data_received(data)

    def _closed(self) -> None:
        self._transport = None
        self._among.open.discard(self)
        self._chunks, self._size, self._request = [], 0, None  # a circle, with a body that was on its way
        if self._idle is not None:
            self._idle.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Whether it has been silent for too long."""
        quiet = 0.0 if self._task is not None else loop.time() - self._heard
        if quiet >= IDLE_S:
            self.end()
        else:
            self._idle = loop.call_later(IDLE_S - quiet, self._look, loop)

    def _wake(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)


def _may_be_plain(data: bytes) -> bool:
    """Whether these may be the first bytes of a request that is read here. Who begins otherwise is told at once: TLS
    on a port without it, for instance."""
    begins = any(data.startswith(b) or b.startswith(data) for b in BEGINNINGS)
    return begins and data.count(b"\n") == data.count(b"\r\n")


class _Head:
    """The head of a request, for httptools. It does not keep the parser, which keeps it: each call would leave a
    circle behind for the garbage collector to find."""

    def __init__(self, connection: Connection, data: bytes) -> None:
        self._connection, self._data = connection, data
        self._url = b""
        self._headers: list[tuple[str, str]] = []
        self._seen = ""

    def on_message_begin(self) -> None:
        self._seen += "b"

    def on_headers_complete(self) -> None:
        self._seen += "h"

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # As aiohttp: white space around a value is none of it, whatever is no UTF-8 comes through unchanged.
        self._headers.append((_text(name), _text(value.strip(b" \t"))))

    def request(self, routes: Mapping[str, Any], max_body: int) -> tuple[Request, int, int] | None:
        """The request, and where its body begins and ends; None where it is not of the plain form."""
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(self._data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return None
        if self._seen != "bh" or parser.get_http_version() != "1.1":  # one head, and all of it
            return None
        path, match_info = self._url.decode("ascii", "replace").partition("?")[0], {}
        if (keyed := KEYED.fullmatch(path)) is not None:
            path, match_info = keyed[2], {"key": keyed[1]}
        route = f"{parser.get_method().decode()} {path}"
        headers = CIMultiDict(self._headers)
        if (
            len({n.lower() for n in headers}) != len(headers)
            or len(headers) > MAX_HEADERS
            or "host" not in headers
        ):
            return None
        length = int(headers.get("content-length", "0" if route.startswith("GET ") else "-1"))
        if route not in routes or not 0 <= length <= max_body or any(name in headers for name in UNPLAIN):
            return None
        request = Request(self._connection, route, match_info, headers, _closes(headers))
        return request, len(self._data), len(self._data) + length


def _closes(headers: CIMultiDict[str]) -> bool:
    """Whether the client wants the connection's end after this request."""
    return any(t.strip().lower() == "close" for t in headers.get("connection", "").split(","))


def _text(said: bytes) -> str:
    return said.decode("utf-8", "surrogateescape")


def readable(value: str) -> str:
    """A header's value as it can be written down: bytes of it that are no UTF-8 as \\xNN."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


_dated = (0, "")


def _date() -> str:
    """Now, as HTTP tells it; once a second it is made anew."""
    global _dated
    now = int(time.time())
    if _dated[0] != now:
        _dated = now, formatdate(now, usegmt=True)
    return _dated[1]


def _head(status: int, headers: Mapping[str, str], close: bool) -> bytes:
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}", f"Date: {_date()}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if close:
        lines.append("Connection: close")
    head = "\r\n".join(lines)
    if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1:
        raise ValueError(f"a header has a line break in it: {headers}")
    return f"{head}\r\n\r\n".encode()


_REASONS = {s.value: s.phrase for s in HTTPStatus}


Incoming = web.Request | Request
"""A request, whichever of the two servers it came to."""
