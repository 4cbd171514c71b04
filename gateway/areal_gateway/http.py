"""What both planes do with a request and an answer. Invariant: no body is read past the limit, compressed
or not, and no client ever sees a stack trace."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from areal_agent.errors import GatewayError
from areal_gateway.core import GATEWAY, Gateway
from areal_gateway.ledger import LedgerError
from areal_gateway.turns import Turns

log = logging.getLogger(__name__)

JSON = "application/json"

RETRY_AFTER_S = 10
"""With a 503. The call has waited gateway.hold_timeout_s already; an engine takes some 30 s to start."""

PASSING = frozenset({408, 425, 429})
"""Refusals that may be none a little later; after any other, the same request is refused again."""

Handler = Callable[[Gateway, web.Request], Awaitable[web.StreamResponse]]
ErrorBody = Callable[[GatewayError], bytes]


async def read_json(request: web.Request, turns: Turns | None = None) -> Any:
    """The parsed body, with `turns` in a turn that begins with the parsing.

    Raises GatewayError: 413 too large (counted after decompression), 400 no JSON.
    """
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge as e:
        limit = request.client_max_size
        raise GatewayError(
            f"the request body is larger than {limit} bytes; raise gateway.max_body_mib if that is meant",
            status=413,
            code="body_too_large",
        ) from e
    except web.RequestPayloadError as e:
        raise GatewayError(f"the request body cannot be read: {e}", status=400, code="invalid_body") from e
    if turns is not None:
        await turns.turn()
    try:
        return orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as e:
        raise GatewayError(f"the request body is no JSON: {e}", status=400, code="invalid_json") from e


def route_of(request: web.Request) -> str:
    """The path as it was declared; the path as it was asked for may hold a key."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "(unknown path)"


async def not_found(_: Gateway, request: web.Request) -> web.StreamResponse:
    """A wrong base_url is the usual reason why no call is ever seen: say so, on both sides."""
    log.warning("%s from %s for a path that is not served", request.method, request.remote)
    raise GatewayError(
        f"there is no {request.method} {request.path} here; an agent's base_url is http://HOST:PORT/v1 (or "
        "/s/KEY/v1), the admin plane is under /admin",
        status=404,
        code="unknown_path",
    )


def answer(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type=JSON)


def admin_error(error: GatewayError) -> bytes:
    return orjson.dumps({"error": {"message": str(error), "code": error.code}})


def guarded(
    handler: Handler, error_body: ErrorBody
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The handler with errors turned into answers of the plane's shape."""

    async def handle(request: web.Request) -> web.StreamResponse:
        gateway = request.app[GATEWAY]
        try:
            return await handler(gateway, request)
        except GatewayError as e:
            error = e
        except LedgerError as e:
            log.error("%s %s: %s", request.method, route_of(request), e)
            error = GatewayError(str(e), status=500, code="ledger_error")
        except web.HTTPException:
            raise
        except ConnectionResetError:  # the client left while it was being answered; there is nobody to tell
            raise
        except Exception:
            log.exception("%s %s failed", request.method, route_of(request))
            error = GatewayError(
                "the gateway failed on this request; its log says why", status=500, code="internal"
            )
        gateway.metrics.refused.labels(error.code or "error").inc()
        status = error.status or 500
        response = web.Response(body=error_body(error), status=status, content_type=JSON)
        if status == 503:
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
        if 400 <= status < 500 and status not in PASSING:
            # SDKs retry a 409 of their own accord; OpenAI's and Anthropic's heed this header.
            response.headers["x-should-retry"] = "false"
        return response

    return handle
