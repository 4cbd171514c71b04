"""The gateway's OpenAPI 3.1 description. Invariant: it is made from the routes that are served and the
dialects' own field tables, so it names no path or field that is not there, and misses none.

Request fields have no types here: a dialect reads any JSON value or says in a sentence why not (400).
"""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from areal_gateway.core import Gateway
from areal_gateway.dialects import COUNTERS, DIALECTS
from areal_gateway.dialects.fields import Field
from areal_gateway.http import answer

ERRORS = {
    "400": "the request cannot be read or served; `error.message` says why",
    "401": "no key, or one that does not reach this",
    "404": "there is no such thing",
    "409": "the session is sealed or too late, or the lease or update ended otherwise",
    "413": "the body is larger than gateway.max_body_mib",
    "500": "the gateway failed, or its ledger could not be written",
    "503": "no engine could serve the call",
    "504": "the call took longer than fleet.call_timeout_s",
}
OPEN_TO_ALL = {"/health", "/metrics", "/openapi.json"}


def describe(app: web.Application) -> dict[str, Any]:
    """The whole description."""
    paths: dict[str, dict[str, Any]] = {}
    for route in app.router.routes():
        if route.resource is None or route.method in ("*", "HEAD"):
            continue
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical)
        paths.setdefault(path, {})[route.method.lower()] = _operation(path, route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "areal_agent gateway", "version": "1"},
        "paths": dict(sorted(paths.items())),
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        },
    }


def _operation(path: str, route: web.AbstractRoute) -> dict[str, Any]:
    bare = path.removeprefix("/s/{key}")
    row = DIALECTS.get(bare) or COUNTERS.get(bare)
    said = {"description": "done", "content": {}}
    out: dict[str, Any] = {
        "responses": {"2XX": said} | {code: {"description": why} for code, why in ERRORS.items()}
    }
    if names := re.findall(r"\{(\w+)\}", path):
        out["parameters"] = [
            {"name": n, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for n in names
        ]
    if path not in OPEN_TO_ALL and bare == path:
        out["security"] = [{"bearer": []}, {"x-api-key": []}]
    if route.method == "POST":
        schema = {"type": "object", "properties": _properties(row.fields)} if row else {"type": "object"}
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return out


def _properties(fields: dict[str, Field]) -> dict[str, Any]:
    return {name: {"description": f"{f.treatment}: {f.why}"} for name, f in fields.items()}


async def document(_: Gateway, request: web.Request) -> web.Response:
    return answer(describe(request.app))
