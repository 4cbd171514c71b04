"""What both planes do with a request and an answer. Invariant: no body is read past the limit, compressed
or not, and no client ever sees a stack trace."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from areal_agent.errors import GatewayError
from areal_gateway.connection import Handle
from areal_gateway.core import GATEWAY, Gateway
from areal_gateway.ledger import LedgerError
from areal_gateway.plain import Incoming, Request, Stream
from areal_gateway.turns import turns

log = logging.getLogger(__name__)

JSON = "application/json"

RETRY_AFTER_S = 10
"""With a 503. The call has waited gateway.hold_timeout_s already; an engine takes some 30 s to start."""

PASSING = frozenset({408, 425, 429})
"""Refusals that may be none a little later; after any other, the same request is refused again."""

Handler = Callable[[Gateway, web.Request], Awaitable[web.StreamResponse]]
ErrorBody = Callable[[GatewayError], bytes]


class Refusal(NamedTuple):
    """An error as the client is told of it; its body is JSON."""

    status: int
    headers: dict[str, str]
    body: bytes


async def read_json(request: Incoming) -> Any:
    """The parsed body, in a turn of the loop that begins with the parsing.

    Raises GatewayError: 413 too large (counted after decompression), 400 no JSON.
    """
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge as e:
        raise GatewayError(
            f"the request body is larger than gateway.max_body_mib allows: {e.text}; raise it if that is meant",
            status=413,
            code="body_too_large",
        ) from e
    except web.RequestPayloadError as e:
        raise GatewayError(f"the request body cannot be read: {e}", status=400, code="invalid_body") from e
    await turns().turn()
    try:
        return orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as e:
        raise GatewayError(f"the request body is no JSON: {e}", status=400, code="invalid_json") from e


def route_of(request: Incoming) -> str:
    """The path as it was declared; the path as it was asked for may hold a key."""
    if isinstance(request, Request):
        return request.route
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


async def send(request: Incoming, headers: dict[str, str], body: bytes) -> web.Response | None:
    """A whole answer, to the last byte; then what aiohttp wants to be given back."""
    if isinstance(request, Request):
        await request.answer(200, headers, body)
        return None
    response = web.Response(headers=headers, body=body)
    await response.prepare(request)
    await response.write_eof()
    return response


async def tell(request: Incoming, value: Any) -> web.Response | None:
    """As `send`, of a value."""
    return await send(request, {"Content-Type": JSON}, orjson.dumps(value))


Streaming = web.StreamResponse | Stream


def streaming(request: Incoming, headers: dict[str, str]) -> Any:
    """An answer that is told as it comes, one of Streaming."""
    if isinstance(request, Request):
        return request.stream(headers)
    return web.StreamResponse(headers=headers)


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
        except web.HTTPException:
            raise
        except Exception as e:
            if request.writer.output_size:
                log.exception("%s failed after its answer had begun", route_of(request))
                raise ConnectionResetError("an answer cannot be given twice") from e
            status, headers, body = refusal(gateway, request, e, error_body)
            return web.Response(status=status, headers=headers, body=body)

    return handle


def plain(
    gateway: Gateway, handler: Callable[[Gateway, Incoming], Awaitable[object]], error_body: ErrorBody
) -> Handle:
    """The same for a plain call, which is answered on its own connection."""

    async def handle(request: Request) -> None:
        try:
            await handler(gateway, request)
        except Exception as e:
            if request.begun:
                raise
            await request.answer(*refusal(gateway, request, e, error_body))

    return handle


def refusal(gateway: Gateway, request: Incoming, failure: Exception, error_body: ErrorBody) -> Refusal:
    """What a client is told of a failed request. Raises the failure where there is nobody to tell."""
    if isinstance(failure, ConnectionResetError):  # the client left while it was being answered
        raise failure
    error = told_of(request, failure)
    gateway.metrics.refused.labels(error.code or "error").inc()
    status = error.status or 500
    headers = {"Content-Type": JSON}
    if status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if 400 <= status < 500 and status not in PASSING:
        # SDKs retry a 409 of their own accord; OpenAI's and Anthropic's heed this header.
        headers["x-should-retry"] = "false"
    return Refusal(status, headers, error_body(error))


def told_of(request: Incoming, failure: Exception) -> GatewayError:
    """The failure in words for a client; what is not meant for one is logged."""
    if isinstance(failure, GatewayError):
        error = failure
    elif isinstance(failure, LedgerError):
        log.error("%s: %s", route_of(request), failure)
        error = GatewayError(str(failure), status=500, code="ledger_error")
    else:
        log.error("%s failed", route_of(request), exc_info=failure)
        error = GatewayError(
            "the gateway failed on this request; its log says why", status=500, code="internal"
        )
    failure.__traceback__ = None  # it may be kept, see Exchange.end
    return error
