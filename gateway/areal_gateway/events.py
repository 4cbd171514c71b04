"""What happens, as it happens, to whoever listens.

Invariant: a slow listener never holds up the gateway and never grows without bound: its oldest events
are dropped and it is told how many.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

LISTENER_LIMIT = 1000
"""Events a listener may lag behind."""


class Listener:
    """One subscription: an async iterator of events; None when nothing came within `idle_s`."""

    def __init__(self, idle_s: float) -> None:
        self._events: deque[dict[str, Any]] = deque()
        self._wake = asyncio.Event()
        self._lost = 0
        self._idle_s = idle_s

    def put(self, event: dict[str, Any]) -> None:
        if len(self._events) >= LISTENER_LIMIT:
            self._events.popleft()
            self._lost += 1
        self._events.append(event)
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[dict[str, Any] | None]:
        while True:
            while self._events:
                if self._lost:
                    lost, self._lost = self._lost, 0
                    yield {"type": "events_lost", "count": lost}
                yield self._events.popleft()
            self._wake.clear()
            try:
                async with asyncio.timeout(self._idle_s):
                    await self._wake.wait()
            except TimeoutError:
                yield None


class EventBus:
    """Publishes events {"type", "time", ...} to every listener. Call from the event loop only."""

    def __init__(self) -> None:
        self._listeners: set[Listener] = set()

    def publish(self, type_: str, **fields: Any) -> None:
        self.forward({"type": type_, **fields})

    def forward(self, event: dict[str, Any]) -> None:
        """An event somebody else made, such as the fleet; it gets its time here unless it has one."""
        if self._listeners:
            event = {"time": time.time(), **event}
            for listener in self._listeners:
                listener.put(event)

    @contextmanager
    def listen(self, idle_s: float) -> Iterator[Listener]:
        listener = Listener(idle_s)
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)
