"""Keys, planes and bodies: what a stranger, or an agent, can not do."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from gateway_support import ADMIN_KEY, PROJECT_KEY, Served, make_app

from areal_agent.config import GatewayConfig
from areal_agent.errors import ConfigError
from areal_gateway.admin import is_ids
from areal_gateway.server import bind
from areal_gateway.tokens import Tokens

ASK = {"messages": [{"role": "user", "content": "hi"}]}


async def ask(served: Served, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
    async with served.http.post(served.url + path, json=ASK, headers=headers) as r:
        return r.status, await r.json()


@pytest.mark.parametrize("key", [None, "Bearer ", "Bearer nonsense", "Basic abc", f"Bearer {ADMIN_KEY}"])
async def test_without_a_sessions_key_there_is_no_call(served: Served, key: str | None) -> None:
    status, body = await ask(served, **({"Authorization": key} if key else {}))
    assert status == 401
    assert body["error"]["code"] == "unauthorized"
    assert served.fleet.asked == []


async def test_every_way_to_present_the_key(served: Served) -> None:
    session = await served.open()
    key = session["api_key"]
    assert (await ask(served, Authorization=f"Bearer {key}"))[0] == 200
    assert (await ask(served, **{"x-api-key": key}))[0] == 200
    assert (await ask(served, path=f"/s/{key}/v1/chat/completions"))[0] == 200
    assert (await ask(served, path="/s/wrong/v1/chat/completions"))[0] == 401


async def test_an_agents_key_opens_no_admin_door(served: Served) -> None:
    session = await served.open()
    routes = {
        (r.method, r.resource.canonical)
        for r in served.app.router.routes()
        if r.resource is not None and r.resource.canonical.startswith("/admin")
    }
    assert len(routes) > 10
    for method, path in routes:
        for headers in ({}, {"Authorization": f"Bearer {session['api_key']}"}, {"x-api-key": "x"}):
            url = served.url + path.replace("{id}", session["session_id"])
            async with served.http.request(method, url, headers=headers, json={}) as r:
                assert r.status == 401, (method, path)


async def test_a_key_reaches_its_own_session_only(served: Served) -> None:
    mine, other = await served.open(), await served.open()
    await served.post(mine, ASK)
    assert len((await served.inspect(mine))["calls"]) == 1
    assert (await served.inspect(other))["calls"] == []


async def test_unauthorised_calls_are_counted(served: Served) -> None:
    await ask(served)
    async with served.http.get(served.url + "/metrics") as r:
        assert 'areal_unauthorized_total{plane="agent"} 1.0' in await r.text()


async def test_no_key_is_in_the_ledger_or_the_log(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    session = await served.open()
    await ask(served, path=f"/s/{session['api_key']}/v1/chat/completions")
    await ask(served, path=f"/s/{session['api_key']}x/v1/chat/completions")
    await served.seal(session)
    assert session["api_key"] not in caplog.text
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        dump = "\n".join(db.iterdump())
    assert session["api_key"] not in dump
    assert session["session_id"] in dump


async def test_a_compressed_body_is_read(served: Served) -> None:
    session = await served.open()
    headers = {"Authorization": f"Bearer {session['api_key']}", "Content-Encoding": "gzip"}
    raw = gzip.compress(json.dumps(ASK).encode())
    async with served.http.post(served.url + "/v1/chat/completions", data=raw, headers=headers) as r:
        assert r.status == 200
    (call,) = (await served.inspect(session))["calls"]
    assert call["messages"] == ASK["messages"]


@pytest.mark.parametrize("compressed", [False, True])
async def test_a_body_is_bounded_after_decompression(
    tokens: Tokens, tmp_path: Path, compressed: bool
) -> None:
    served = make_app(tokens, tmp_path, gateway={"max_body_mib": 1.0})
    await served.start()
    try:
        session = await served.open()
        raw = b'{"messages": [{"role": "user", "content": "' + b"x" * (64 * 2**20) + b'"}]}'
        headers = {"Authorization": f"Bearer {session['api_key']}", "Content-Type": "application/json"}
        if compressed:
            raw = gzip.compress(raw)
            assert len(raw) < 2**20
            headers["Content-Encoding"] = "gzip"
        async with served.http.post(served.url + "/v1/chat/completions", data=raw, headers=headers) as r:
            assert r.status == 413
            assert (await r.json())["error"]["code"] == "body_too_large"
    finally:
        await served.stop()


async def test_deep_json_is_a_400(served: Served) -> None:
    session = await served.open()
    deep = '{"messages": [{"role": "user", "content": ' + "[" * 5000 + "]" * 5000 + "}]}"
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    async with served.http.post(served.url + "/v1/chat/completions", data=deep, headers=headers) as r:
        assert r.status == 400
    almost = '{"tools": ' + "[" * 500 + "]" * 500 + ', "messages": [{"role": "user", "content": "hi"}]}'
    async with served.http.post(served.url + "/v1/chat/completions", data=almost, headers=headers) as r:
        assert r.status == 400


async def test_a_fault_of_ours_shows_no_trace(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await served.open()

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(served.gateway.calls, "start", broken)
    status, _, body = await served.post(session, ASK)
    assert status == 500
    assert "secret detail" not in str(body)


class TestBind:
    def test_loopback_by_default(self) -> None:
        sock = bind(GatewayConfig())
        assert sock.getsockname()[0] == "127.0.0.1"
        sock.close()

    def test_other_addresses_have_to_be_meant(self) -> None:
        with pytest.raises(ConfigError, match="allow_remote"):
            bind(GatewayConfig(host="0.0.0.0"))
        bind(GatewayConfig(host="0.0.0.0", allow_remote=True)).close()

    def test_a_taken_port_is_a_sentence(self) -> None:
        first = bind(GatewayConfig())
        first.listen()
        with pytest.raises(ConfigError, match=r"port \d+.*set gateway.port to 0"):
            bind(GatewayConfig(port=first.getsockname()[1]))
        first.close()

    def test_no_address_is_a_sentence(self) -> None:
        with pytest.raises(ConfigError, match="no address"):
            bind(GatewayConfig(host="no.such.host.invalid"))


@pytest.mark.parametrize("settings", [{}, {"online": {"enabled": True}}], ids=["session", "project"])
@pytest.mark.parametrize("header", ["x-areal-label-node", "Idempotency-Key", "x-areal-session"])
async def test_a_header_of_any_bytes_is_written_down(
    tokens: Tokens, tmp_path: Path, header: str, settings: dict[str, Any]
) -> None:
    served = make_app(tokens, tmp_path, **settings)
    await served.start()
    key = PROJECT_KEY if settings else (await served.open())["api_key"]
    body = json.dumps(ASK).encode()
    head = [b"POST /v1/chat/completions HTTP/1.1", b"Host: here", b"Content-Length: %d" % len(body)]
    head += [b"Authorization: Bearer " + key.encode(), header.encode() + b": a\xffb", b"Connection: close"]
    reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
    writer.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    (row,) = served.ledger.histories([s.id for s in served.gateway.sessions.running()]).values()
    (call,) = row.calls
    told = {
        "x-areal-label-node": call.labels.get("node"),
        "Idempotency-Key": call.retry_key,
        "x-areal-session": row.session.task_id.removeprefix("online:"),
    }
    if settings or header != "x-areal-session":  # a session's key says which session it is
        assert told[header] == "a\\xffb"
    await served.stop()


@pytest.mark.parametrize(
    ("value", "good"),
    [
        ([0, 2**31 - 1], True),
        ([2**31], False),
        ([-1], False),
        ([True], False),
        ([1.0], False),
        ([], False),
        ("1", False),
    ],
)
def test_a_probe_takes_only_what_can_be_a_token_id(value: Any, good: bool) -> None:
    """Engines are asked in 32 bits."""
    assert is_ids(value) is good
