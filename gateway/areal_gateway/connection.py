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
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from areal_gateway.plain import MAX_HEAD, Head, Request, may_be_plain

log = logging.getLogger(__name__)

READ_AHEAD = 2**18
"""Bytes of requests to come that may wait while one is answered."""

IDLE_S = 3630.0
"""How long a connection may say nothing between requests or within one; as aiohttp: longer than any proxy."""

Handle = Callable[[Request], Awaitable[None]]
"""Answers a request over its `answer` or `stream`."""


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
            if end < 0 and self._size < MAX_HEAD and may_be_plain(data):
                self._needed = self._size + 1
                return
            self._request = Head(self, data[: end + 4]).request(self._routes, self._max_body)
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
