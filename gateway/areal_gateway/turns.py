"""The event loop's time, shared out: one stretch of work, then everything else, then the next stretch.

Invariant: of those who ask for a turn, at most one a pass of the loop goes on, in the order in which they
asked; with nobody before it, one goes on at once.

A call computes for a millisecond or two at three places: reading a request, reading what the engine said,
recording a reply. Two hundred clients that come at once would otherwise hold the loop for as many of those in
a row, while streams, health checks and clients that leave wait.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Of one event loop."""

    def __init__(self) -> None:
        self._taken = False
        """Whether somebody had a turn in this pass of the loop."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Go on when it is this caller's turn. What follows, up to the next await, is its stretch of work."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._next, loop)
            return
        waiting: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the next pass of the loop: wake the first who still waits."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():  # else its caller was cancelled
                waiting.set_result(None)
                loop.call_soon(self._next, loop)
                return
        self._taken = False
