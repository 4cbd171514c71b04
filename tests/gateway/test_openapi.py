"""The description matches what is served, and nothing that can be made from it brings a 500."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import schemathesis
from gateway_support import ADMIN_KEY, Served
from hypothesis import HealthCheck, Phase, given, settings

from areal_gateway.dialects import COUNTERS, DIALECTS

STREAMS = {"/admin/events"}
"""Answers that never end."""


async def description(served: Served) -> Any:
    async with served.http.get(served.url + "/openapi.json") as r:
        assert r.status == 200
        return await r.json()


async def test_every_route_and_every_field_is_described(served: Served) -> None:
    paths = (await description(served))["paths"]
    served_paths = {
        re.sub(r"\{(\w+):[^}]*\}", r"{\1}", r.resource.canonical)
        for r in served.app.router.routes()
        if r.resource is not None and r.method != "*"
    }
    assert set(paths) == served_paths
    for path, row in (*DIALECTS.items(), *COUNTERS.items()):
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(body["properties"]) == set(row.fields)
    assert "security" in paths["/admin/sessions"]["post"]
    assert "security" not in paths["/health"]["get"]


async def test_no_request_made_from_it_is_a_500(served: Served) -> None:
    spec = await description(served)
    session = await served.open(deadline_s=1e6)
    schema = schemathesis.openapi.from_dict(spec)
    operations = [o.ok() for o in schema.get_all_operations()]
    assert len(operations) > 25
    seen: set[int] = set()

    def attack() -> None:
        for operation in operations:
            if operation.path in STREAMS:
                continue

            @given(case=operation.as_strategy())
            @settings(
                max_examples=5,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def one(case: Any) -> None:
                admin = case.path.startswith("/admin")
                if case.path.startswith("/s/"):
                    case.path_parameters["key"] = session["api_key"]
                case.headers = {"Authorization": f"Bearer {ADMIN_KEY if admin else session['api_key']}"}
                answer = case.call(base_url=served.url, timeout=20)
                seen.add(answer.status_code)
                assert answer.status_code < 500, (case.method, case.path, case.body, answer.text[:300])
                assert "Traceback" not in answer.text

            one()

    await asyncio.to_thread(attack)
    assert {200, 400} <= seen
