"""Streams of bytes from one HTTP server: POST a body, read what comes while it comes.

Invariant: a stream that ended without an error is the whole body; whoever leaves one early closes its connection,
by which the server knows that nobody waits. Every wait has the request's deadline.

This is the way of every sampled token, so it is no more than httptools' parser on a transport: a general
client costs three times the CPU for a reply. Everything else that is said to an engine goes through aiohttp.
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections import deque
from collections.abc import AsyncIterator
from typing import cast
from urllib.parse import unquote, urlsplit

import httptools

READ_AHEAD = 2**22
"""Bytes that may wait to be read before the connection stops reading."""


class StreamLost(ConnectionError):
    """The connection broke, or what came over it is no HTTP."""


class Reply(asyncio.Protocol):
    """One connection, with the response that is coming over it, if any.

    Attributes:
        status: of the response, once its headers came.
        complete: whether the whole body came.
        heard: whether any byte came in answer to what was sent last.
        lost: why nothing more comes.
    """

    def __init__(self) -> None:
        self.status = 0
        self.complete = True
        self.heard = False
        self.lost: Exception | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._headed = self._framed = False
        self._changed: asyncio.Future[None] | None = None
        self._keep = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.complete:  # an answer to nothing that was asked
            self.end(StreamLost("the server spoke out of turn"))
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self.end(StreamLost(f"the server's answer is no HTTP: {e}"))
        if self._waiting_bytes > READ_AHEAD and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._headed and not self._framed:  # the end of the connection is the body's
            self.complete = True
        if self.lost is None:
            self.lost = StreamLost(f"the connection was lost: {exc or 'closed by the server'}")
        self._transport = None
        self._wake()

    # httptools

    def on_header(self, name: bytes, _: bytes) -> None:
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._waiting_bytes += len(body)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._headed = self.status >= 200  # not "100 Continue"

    def on_message_complete(self) -> None:
        if self._headed:
            self.complete = True
            self._keep = self._parser.should_keep_alive()

    # ours

    @property
    def reusable(self) -> bool:
        return self.complete and self._keep and self.lost is None and self._transport is not None

    def drop(self) -> None:
        """Forget what of the body was not read: the next reply over this connection is another's."""
        self._body.clear()
        if self._waiting_bytes > READ_AHEAD and self._transport is not None:
            self._transport.resume_reading()
        self._waiting_bytes = 0

    def send(self, request: bytes) -> None:
        """Begin an exchange."""
        if self._transport is None:
            raise self.lost or StreamLost("the connection is closed")
        self.drop()
        self.status = 0
        self.complete = self.heard = self._headed = self._framed = self._keep = False
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    async def headers(self) -> None:
        """Wait until the status is known."""
        while not self._headed:
            if self.lost is not None:
                raise self.lost
            await self._change()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, what came at once in one piece. Raises OSError where it broke off."""
        while True:
            if self._body:
                data = b"".join(self._body) if len(self._body) > 1 else self._body[0]
                self.drop()
                yield data
            elif self.complete:
                return
            elif self.lost is not None:
                raise self.lost
            else:
                await self._change()

    async def text(self) -> str:
        """The body, of an answer that is an error."""
        return b"".join([chunk async for chunk in self.chunks()]).decode(errors="replace")

    def end(self, error: Exception) -> None:
        """Break it off from our side: who reads gets `error`."""
        if not self.complete and self.lost is None:
            self.lost = error
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    async def _change(self) -> None:
        self._changed = asyncio.get_running_loop().create_future()
        await self._changed

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


class Streams:
    """Connections to one server.

    Args:
        url: scheme, host, port and what stands before every path.
        connect_s: longest a connection may take to come about.
        keep_s: how long one may lie idle; less than the server keeps it.
    """

    def __init__(self, url: str, *, connect_s: float, keep_s: float) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._before = parts.path.rstrip("/")
        self._netloc = parts.netloc.rpartition("@")[2]
        self._connect_s, self._keep_s = connect_s, keep_s
        self._idle: list[tuple[float, Reply]] = []
        self._running: dict[Reply, asyncio.TimerHandle] = {}
        self._closed = 0
        """How often it was closed: what was asked before is not asked again."""
        credentials = parts.netloc.rpartition("@")[0]
        self._login = (
            f"Authorization: Basic {b64encode(unquote(credentials).encode()).decode()}\r\n"
            if credentials
            else ""
        )

    def post(self, path: str, body: bytes, timeout_s: float) -> Posted:
        """The reply to a JSON body, its headers read. Sent once more where a pooled connection turned out to be
        closed (no byte came). Raises OSError, TimeoutError after `timeout_s`, also from the reply's own methods."""
        head = (
            f"POST {self._before}{path} HTTP/1.1\r\nHost: {self._netloc}\r\nContent-Type: application/json\r\n"
            f"{self._login}Content-Length: {len(body)}\r\n\r\n"
        )
        return Posted(self, head.encode() + body, timeout_s)

    async def begin(self, request: bytes, timeout_s: float) -> Reply:
        """Of Posted."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        closed = self._closed
        if (reply := self._pooled()) is not None:
            try:
                return await self._ask(reply, request, deadline)
            except StreamLost:
                if reply.heard or closed != self._closed:
                    raise
        reply = await self._connect(deadline)
        if closed != self._closed:
            lost = StreamLost("cut by us")
            reply.end(lost)
            raise lost
        return await self._ask(reply, request, deadline)

    async def _ask(self, reply: Reply, request: bytes, deadline: float) -> Reply:
        loop = asyncio.get_running_loop()
        self._running[reply] = loop.call_at(deadline, reply.end, TimeoutError("the deadline passed"))
        try:
            reply.send(request)
            await reply.headers()
        except BaseException:
            self.leave(reply)
            raise
        return reply

    def leave(self, reply: Reply) -> None:
        """Of Posted: read to its end or not, nobody reads it any more."""
        self._running.pop(reply).cancel()
        if reply.reusable:
            reply.drop()
            self._idle.append((asyncio.get_running_loop().time(), reply))
        else:
            reply.end(StreamLost("left"))

    async def _connect(self, deadline: float) -> Reply:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(deadline, loop.time() + self._connect_s)):
                _, reply = await loop.create_connection(Reply, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            if loop.time() >= deadline:
                raise
            raise StreamLost(f"no connection within {self._connect_s:g} s") from None  # lost, not late
        return reply

    def _pooled(self) -> Reply | None:
        """The connection that was used last, of those that the server still keeps; the others are closed."""
        now = asyncio.get_running_loop().time()
        idle, self._idle = self._idle, []
        for at, reply in idle:
            if reply.reusable and now - at < self._keep_s:
                self._idle.append((at, reply))
            else:
                reply.end(StreamLost("idle for long"))
        return self._idle.pop()[1] if self._idle else None

    def close(self) -> None:
        """Cut every stream that runs, and close what lies idle. What is asked afterwards goes over new connections."""
        self._closed += 1
        for reply in list(self._running):
            reply.end(StreamLost("cut by us"))
        for _, reply in self._idle:
            reply.end(StreamLost("closed"))
        self._idle = []


class Posted:
    """A request: its reply while inside. A class, which costs a quarter of what a generator made into one does."""

    __slots__ = ("_reply", "_request", "_streams", "_timeout_s")

    def __init__(self, streams: Streams, request: bytes, timeout_s: float) -> None:
        self._streams, self._request, self._timeout_s = streams, request, timeout_s
        self._reply: Reply | None = None

    async def __aenter__(self) -> Reply:
        self._reply = await self._streams.begin(self._request, self._timeout_s)
        return self._reply

    async def __aexit__(self, *_: object) -> None:
        if self._reply is not None:
            self._streams.leave(self._reply)
