"""The agent plane: what an agent's own client talks to. The key is the session.

Invariant: a key reaches its own session; what the agent gets is what the ledger has, and a reply counts
as delivered only after its last byte was handed to the connection.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import orjson
from aiohttp import web

from areal_agent.errors import GatewayError
from areal_gateway import auth
from areal_gateway.ahead import Ahead
from areal_gateway.connection import Handle
from areal_gateway.core import Gateway
from areal_gateway.dialects import COUNTERS, DIALECTS, Counter, Dialect, Served
from areal_gateway.exchange import CallRequest, Exchange
from areal_gateway.feedback import give
from areal_gateway.fields import mapping
from areal_gateway.http import (
    JSON,
    ErrorBody,
    Streaming,
    answer,
    guarded,
    plain,
    read_json,
    route_of,
    send,
    streaming,
    tell,
    told_of,
)
from areal_gateway.online import Online, goes_on
from areal_gateway.plain import Incoming, readable
from areal_gateway.prepare import settle
from areal_gateway.sessions import Session
from areal_gateway.wishes import Wishes

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 10.0
"""A stream with nothing to say sends a sign of life this often; clients and proxies count silence as death."""

LABEL_HEADER = "x-areal-label-"

Route = Callable[[Gateway, Incoming], Awaitable[Any]]
"""It gives back what aiohttp wants to have of a handler, where the request came to aiohttp."""

EVENTS = "text/event-stream; charset=utf-8"


def _table() -> dict[str, tuple[Route, ErrorBody]]:
    """What is served, by method and path, and how each words an error."""
    openai_error = DIALECTS["/v1/chat/completions"].error
    table: dict[str, tuple[Route, ErrorBody]] = {
        "GET /v1/models": (models, openai_error),
        "POST /v1/rewards": (rewards, openai_error),
    }
    table |= {f"POST {d.path}": (completions(d), d.error) for d in DIALECTS.values()}
    return table | {f"POST {c.path}": (count(c), c.error) for c in COUNTERS.values()}


def routes(app: web.Application) -> None:
    """Every path also exists under /s/{key}, for clients that cannot set a key."""
    for prefix in ("", "/s/{key}"):
        for route, (handler, error) in _table().items():
            method, path = route.split()
            add = app.router.add_get if method == "GET" else app.router.add_post
            add(prefix + path, guarded(handler, error))
        named = guarded(model, DIALECTS["/v1/chat/completions"].error)
        app.router.add_get(prefix + "/v1/models/{model:.+}", named)


def plain_routes(gateway: Gateway) -> dict[str, Handle]:
    """What needs none of aiohttp, by method and path."""
    return {route: plain(gateway, *handled) for route, handled in _table().items()}


async def authenticate(gateway: Gateway, request: Incoming) -> Session | Online:
    """Whose calls these are: a session's, or the project's, which are told apart by what they say."""
    key = auth.presented_key(request)
    try:
        if key is None:
            raise GatewayError(
                "no key: send the session's api_key as `Authorization: Bearer` or `x-api-key`",
                status=401,
                code="unauthorized",
            )
        if (session := gateway.sessions.open_by_key(key)) is not None:  # nearly always
            return session
        if auth.same_key(key, gateway.admin_key):
            raise GatewayError(
                "the admin key makes no calls; open a session and use its api_key",
                status=401,
                code="unauthorized",
            )
        if gateway.project_key is not None and auth.same_key(key, gateway.project_key):
            return gateway.online
        return await gateway.sessions.by_key(key)
    except GatewayError as e:
        if e.status == 401:
            gateway.metrics.unauthorized.labels("agent").inc()
            log.warning("unauthorized request to %s from %s: %s", route_of(request), request.remote, e)
        raise


def completions(dialect: Dialect) -> Route:
    async def handle(gateway: Gateway, request: Incoming) -> Any:
        caller = await authenticate(gateway, request)
        session = caller if isinstance(caller, Session) else None
        try:
            body = await read_json(request)
            asked = with_labels(dialect.read(body, caller), request)
            config = gateway.config
            # What an evaluation measures is not the agent's to choose.
            fixed = config.sampling.pinned or (session is not None and session.record.purpose == "eval")
            wishes = None if fixed else Wishes.of(body, dialect.fields)
            asked = settle(gateway.tokens, asked, constrain=config.gateway.constrain, wishes=wishes)
            digest = digest_of(dialect.name, body)
            while True:
                if isinstance(caller, Online):
                    session = await caller.session_for(asked, digest, request)
                assert session is not None
                try:
                    ahead = await gateway.calls.prepare(session, asked)
                    exchange = begin(gateway, session, asked, digest, request, ahead)
                    break
                except GatewayError:
                    # A reward closed it meanwhile: an online service knows of no sessions, it gets the next one.
                    if not isinstance(caller, Online) or goes_on(session):
                        raise
        except GatewayError as e:
            if session is not None:
                session.last_error = str(e)
            log.info("session %s: request refused: %s", session.id if session else "(none yet)", e)
            raise
        served = Served(gateway.tokens, gateway.model)
        patient = "x-stainless-retry-count" in request.headers
        with exchange.subscribed(patient=patient):
            if asked.stream:
                return await stream(gateway, session, dialect, served, asked, exchange, request)
            records = await exchange.wait()
            body = dialect.reply(served, asked, exchange)
            response = await send(request, headers(JSON, asked, exchange), body)
            gateway.sessions.delivered(session, [r.call_id for r in records])
            return response

    return handle


def count(counter: Counter) -> Route:
    async def handle(gateway: Gateway, request: Incoming) -> Any:
        caller = await authenticate(gateway, request)
        body = await read_json(request)
        asked = counter.read(body, caller)
        known = caller.find(asked, b"", request) if isinstance(caller, Online) else caller
        tokens = await gateway.calls.count(known or gateway.online.blank(), asked)
        return await send(request, {"Content-Type": JSON}, counter.reply(tokens))

    return handle


def digest_of(dialect: str, body: Any) -> bytes:
    """Of a request. Ledgers have it, and by it a retry after a restart is known: it has to stay as it is."""
    said = dialect.encode() + orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(said, digest_size=16).digest()


def begin(
    gateway: Gateway,
    session: Session,
    asked: CallRequest,
    digest: bytes,
    request: Incoming,
    ahead: Ahead,
) -> Exchange:
    """The exchange that this request repeats, or a new one."""
    count = request.headers.get("x-stainless-retry-count", "0")
    if (retry_key := request.headers.get("Idempotency-Key")) is not None:
        retry_key = readable(retry_key)
    found = gateway.calls.find_retry(
        session, digest, retry_count=int(count) if count.isdecimal() else 0, retry_key=retry_key
    )
    return found or gateway.calls.start(session, asked, digest, retry_key, ahead)


async def stream(
    gateway: Gateway,
    session: Session,
    dialect: Dialect,
    served: Served,
    asked: CallRequest,
    exchange: Exchange,
    request: Incoming,
) -> Streaming:
    """Server-sent events. Before the first byte an error is an HTTP status, afterwards an event."""
    encoder = dialect.stream(served, asked, exchange)
    said = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers(EVENTS, asked, exchange)}
    response = streaming(request, said)
    rest = b""
    try:
        async for fresh in exchange.listen(KEEP_ALIVE_S):
            data = b"".join(map(encoder.said, fresh)) if fresh else encoder.idle()
            if exchange.finished and exchange.error is None:
                rest += data  # goes with the end: a write costs as much as all that is in it
                continue
            if not response.prepared:
                await response.prepare(request)
            await response.write(data)
        rest += encoder.done(exchange.records)
    except ConnectionResetError:
        raise
    except Exception as e:
        if not response.prepared:
            raise
        await response.write(encoder.failed(told_of(request, e)))
        await response.write_eof()
        return response
    if not response.prepared:
        await response.prepare(request)
    await response.write_eof(rest)
    gateway.sessions.delivered(session, [r.call_id for r in exchange.records])
    return response


def headers(content_type: str, asked: CallRequest, exchange: Exchange) -> dict[str, str]:
    out = {"Content-Type": content_type, "x-request-id": exchange.exchange_id}
    if asked.ignored:
        shown = ", ".join(asked.ignored).encode("ascii", "replace").decode()
        out["x-areal-ignored"] = "".join(c if c.isprintable() else "?" for c in shown)[:1000]
    return out


def with_labels(asked: CallRequest, request: Incoming) -> CallRequest:
    """`x-areal-label-NAME: value` headers, percent-encoded, join the labels of the body, and win."""
    for name, value in request.headers.items():
        if name.lower().startswith(LABEL_HEADER):
            asked.labels[name[len(LABEL_HEADER) :].lower()[:64]] = unquote(readable(value))[:512]
    return asked


async def models(gateway: Gateway, request: Incoming) -> Any:
    await authenticate(gateway, request)
    return await tell(request, {"object": "list", "data": [_model(gateway, gateway.model)]})


async def model(gateway: Gateway, request: web.Request) -> web.Response:
    """Any name is served by the one policy there is."""
    await authenticate(gateway, request)
    return answer(_model(gateway, request.match_info["model"]))


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "areal_agent",
        "max_model_len": gateway.tokens.context,
    }


async def rewards(gateway: Gateway, request: Incoming) -> Any:
    """An agent, or the service around it, rewards its own session; `response_id` says for which reply."""
    caller = await authenticate(gateway, request)
    body = mapping(await read_json(request))
    if isinstance(caller, Online):
        return await tell(request, {"session_id": await caller.reward(body, request)})
    await give(gateway.sessions, caller.id, body)
    return await tell(request, {"session_id": caller.id})
