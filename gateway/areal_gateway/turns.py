"""The event loop's time, shared out: a few stretches of work, then everything else, then the next few.

Invariant: of those who ask for a turn, at most A_PASS go on in one pass of the loop, and after PASS_S of it none but
the first, in the order in which they asked; with fewer before it, one goes on at once.

A call computes for half a millisecond to several at three places: reading a request, reading what the engine said,
recording a reply. Two hundred clients that come at once would otherwise hold the loop for as many of those in
a row, while streams, health checks and clients that leave wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from weakref import WeakKeyDictionary

A_PASS = 4
"""One a pass costs a sixth of the calls a second, in passes; with four of a millisecond the loop is soon free again."""

PASS_S = 0.004
"""Stretches over long prompts and replies take several milliseconds each; then a pass has one."""


class Turns:
    """Of one event loop."""

    def __init__(self) -> None:
        self._taken = 0
        """Turns given in this pass of the loop; the first of them asked for the next pass."""
        self._begun = False
        """Whether one of them has begun; from then on there is time until `_ends`."""
        self._ends = 0.0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._woken = 0
        """Those whose turn it is and who have not gone on yet; nobody may go on before them."""
        self._late: list[asyncio.Future[None]] = []
        """Those who had their turn when there was no time left; they are the first of the next pass."""

    async def turn(self) -> None:
        """Go on when it is this caller's turn. What follows, up to the next await, is its stretch of work."""
        loop = asyncio.get_running_loop()
        free = self._taken < A_PASS and not (self._woken or self._late or self._waiting)
        if free and (not self._taken or self._in_time()):
            if not self._taken:
                loop.call_soon(self._next, loop)
                self._in_time()
            self._taken += 1
            return
        waiting: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiting)
        await self._until(waiting)
        while not self._in_time():
            waiting = loop.create_future()
            self._late.append(waiting)
            await self._until(waiting)

    async def _until(self, waiting: asyncio.Future[None]) -> None:
        try:
            await waiting
        finally:
            if waiting.done() and not waiting.cancelled():  # also when the caller was cancelled after that
                self._woken -= 1

    def _in_time(self) -> bool:
        """Whether one more stretch may begin in this pass; the first begins the count."""
        now = time.perf_counter()
        if not self._begun:
            self._begun, self._ends = True, now + PASS_S
        return now < self._ends

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the next pass of the loop: wake the first who still wait."""
        self._taken, self._begun = 0, False
        self._waiting.extendleft(reversed(self._late))
        self._late.clear()
        while self._waiting and self._taken < A_PASS:
            waiting = self._waiting.popleft()
            if not waiting.done():  # else its caller was cancelled
                waiting.set_result(None)
                self._woken += 1
                self._taken += 1
        if self._taken:
            loop.call_soon(self._next, loop)


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()


def turns() -> Turns:
    """Those of the running loop: whoever computes on it shares them."""
    loop = asyncio.get_running_loop()
    found = _of_loops.get(loop)
    if found is None:
        found = _of_loops[loop] = Turns()
    return found
