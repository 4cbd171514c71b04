"""The application on a port: an agent's requests on our own connections, everything else on aiohttp's.

Invariant: a gateway that stops takes no new request, tells what its calls came to, and then closes every connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from areal_gateway.agent import plain_routes
from areal_gateway.connection import Connection, Connections
from areal_gateway.core import GATEWAY

ABORT_S = 1.0
"""Longest that answers which were broken off may take to end."""


class GatewayRunner(web.AppRunner):
    """As aiohttp's, for an application that `create_app` made."""

    __slots__ = ("_connections", "_stop_s")

    def __init__(self, app: web.Application, *, shutdown_timeout: float = 60.0, **settings: Any) -> None:
        # Without it, a client that leaves would go unnoticed.
        settings = {"handler_cancellation": True, "access_log": None, **settings}
        super().__init__(app, shutdown_timeout=shutdown_timeout, **settings)
        self._connections = Connections()
        self._stop_s = shutdown_timeout

    @property
    def server(self) -> Any:
        """What makes the protocol of a connection."""
        other = super().server
        if other is None:
            return None
        return self._factory(other)

    def _factory(self, other: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        gateway = self.app[GATEWAY]
        routes = plain_routes(gateway)
        limit = int(gateway.config.gateway.max_body_mib * 2**20)
        return lambda: Connection(routes, limit, other, self._connections)

    async def shutdown(self) -> None:
        ours = self._connections
        ours.stopping = True
        for connection in list(ours.open):
            connection.end()
        await super().shutdown()
        await self._answered(self._stop_s)
        for connection in list(ours.open):
            connection.abort()
        await self._answered(ABORT_S)

    async def _answered(self, within_s: float) -> None:
        """Until no request is being answered any more, or that long."""
        if tasks := [c.task for c in self._connections.open if c.task is not None]:
            await asyncio.wait(tasks, timeout=within_s)
