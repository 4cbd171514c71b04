"""The HTTP application over a Gateway. Tests give it a fleet of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from areal_agent.config import RunConfig
from areal_gateway import admin, agent, openapi
from areal_gateway.core import GATEWAY, Gateway, GatewayFleet
from areal_gateway.events import EventBus
from areal_gateway.http import admin_error, guarded, not_found
from areal_gateway.ledger import Ledger
from areal_gateway.tokens import Tokens

STOP_S = 5.0
"""Longest a stopping gateway waits for its calls to be written down."""


def create_app(
    *,
    config: RunConfig,
    fleet: GatewayFleet,
    ledger: Ledger,
    tokens: Tokens,
    admin_key: str,
    events: EventBus | None = None,
    project_key: str | None = None,
) -> web.Application:
    """The whole gateway as an aiohttp application; it owns none of its arguments.

    `project_key` is that of online mode; None: there is none.
    Serve it with a GatewayRunner.
    """
    app = web.Application(client_max_size=int(config.gateway.max_body_mib * 2**20))
    app[GATEWAY] = Gateway(
        config=config,
        fleet=fleet,
        ledger=ledger,
        tokens=tokens,
        admin_key=admin_key,
        events=events or EventBus(),
        project_key=project_key,
    )
    agent.routes(app)
    admin.routes(app)
    app.router.add_get("/openapi.json", guarded(openapi.document, admin_error))
    app.router.add_route("*", "/{path:.*}", guarded(not_found, admin_error))
    app.cleanup_ctx.append(_watched)
    app.on_shutdown.append(_abort_calls)
    return app


async def _watched(app: web.Application) -> AsyncIterator[None]:
    gateway = app[GATEWAY]
    watch = asyncio.create_task(gateway.watch(), name="watchdog")
    yield
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch


async def _abort_calls(app: web.Application) -> None:
    """Before open connections are waited for: those wait for these calls."""
    if tasks := app[GATEWAY].stop_calls():
        await asyncio.wait(tasks, timeout=STOP_S)
