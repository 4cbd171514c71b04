"""The event loop's time, shared out: a few stretches of work, then everything else, then the next few.

Invariant: of those who ask for a turn, at most A_PASS go on in one pass of the loop, in the order in which they
asked; with fewer before it, one goes on at once.

A call computes for half a millisecond to two at three places: reading a request, reading what the engine said,
recording a reply. Two hundred clients that come at once would otherwise hold the loop for as many of those in
a row, while streams, health checks and clients that leave wait.
"""

from __future__ import annotations

import asyncio
from collections import deque

A_PASS = 4
"""One a pass costs a sixth of the calls a second, in passes; with four the loop is free again within 8 ms."""


class Turns:
    """Of one event loop."""

    def __init__(self) -> None:
        self._taken = 0
        """Turns taken in this pass of the loop; the first of them asked for the next pass."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Go on when it is this caller's turn. What follows, up to the next await, is its stretch of work."""
        loop = asyncio.get_running_loop()
        if self._taken < A_PASS and not self._waiting:
            if not self._taken:
                loop.call_soon(self._next, loop)
            self._taken += 1
            return
        waiting: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the next pass of the loop: wake the first who still wait."""
        self._taken = 0
        while self._waiting and self._taken < A_PASS:
            waiting = self._waiting.popleft()
            if not waiting.done():  # else its caller was cancelled
                waiting.set_result(None)
                self._taken += 1
        if self._taken:
            loop.call_soon(self._next, loop)
