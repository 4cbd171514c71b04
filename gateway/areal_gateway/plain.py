"""An agent's request in its plainest form, and its answer, as they are read and written.

Invariant: what is read here is what aiohttp reads in the same bytes; of whatever else, nothing is read. No header of an
answer can begin another.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import httptools
from aiohttp import web
from multidict import CIMultiDict

if TYPE_CHECKING:
    from areal_gateway.connection import Connection

MAX_HEAD, MAX_HEADERS = 8190, 128
"""Longest head of a request that is read here, and most headers in it; aiohttp has these limits for each header."""

BEGINNINGS = b"POST ", b"GET "
"""Of what is read here."""

KEYED = re.compile(r"/s/([A-Za-z0-9_-]+)(/.+)")
"""A path with the key in it, for clients that cannot set one elsewhere, and the path without it."""

UNPLAIN = frozenset({"content-encoding", "expect", "sec-websocket-key1", "transfer-encoding", "upgrade"})
"""Headers of requests that are left to aiohttp."""


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


def may_be_plain(data: bytes) -> bool:
    """Whether these may be the first bytes of a request that is read here. Who begins otherwise is told at once: TLS
    on a port without it, for instance."""
    begins = any(data.startswith(b) or b.startswith(data) for b in BEGINNINGS)
    return begins and data.count(b"\n") == data.count(b"\r\n")


class Head:
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
