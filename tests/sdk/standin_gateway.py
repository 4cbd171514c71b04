"""A stand-in for the gateway: its admin plane and a chat endpoint, in memory, on a real loopback port.

It answers each chat call with the session's own key's tail and the version, so a test sees which session
a request reached. `train_step` does what a trainer would: takes the oldest ready groups, bumps the version.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import weakref
from collections import Counter
from typing import Any

from aiohttp import web
from openai import AsyncOpenAI

_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = weakref.WeakKeyDictionary()


def shared_client() -> AsyncOpenAI:
    """A client built with no arguments, one per event loop: building one costs tens of milliseconds."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = AsyncOpenAI()
    return _clients[loop]


ADMIN = "admin-key-of-the-test"


class StandIn:
    state = "complete"
    """In which every call ends."""

    def __init__(self) -> None:
        self.version = 0
        self.sessions: dict[str, dict[str, Any]] = {}
        self.by_key: dict[str, dict[str, Any]] = {}
        self.consumed: list[str] = []
        self.staleness: list[int] = []
        self.most_open_groups = 0
        self.url = ""
        self.headers: list[dict[str, str]] = []
        self.fail_next: list[int] = []
        self.trained_tokens = 5
        self._runner: web.AppRunner | None = None

    async def start(self) -> StandIn:
        app = web.Application(middlewares=[self._faults])
        app.add_routes(
            [
                web.get("/health", self._ok),
                web.post("/admin/sessions", self._open),
                web.post("/admin/sessions/{id}/rewards", self._reward),
                web.post("/admin/sessions/{id}/seal", self._seal),
                web.get("/admin/sessions/{id}", self._inspect),
                web.get("/admin/status", self._status),
                web.post("/v1/chat/completions", self._chat),
                web.post("/s/{key}/v1/chat/completions", self._chat),
                web.post("/v1/messages", self._chat),
            ]
        )
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _faults(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path.startswith("/admin"):
            if request.headers.get("authorization") != f"Bearer {ADMIN}":
                return web.json_response(
                    {"error": {"message": "wrong key", "code": "unauthorized"}}, status=401
                )
            if self.fail_next:
                status = self.fail_next.pop(0)
                if status == 0:
                    assert request.transport is not None
                    request.transport.close()
                    raise ConnectionResetError
                return web.json_response({"error": {"message": "as asked", "code": "test"}}, status=status)
        return await handler(request)

    async def _ok(self, _: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def _open(self, request: web.Request) -> web.Response:
        body = await request.json()
        sid, key = secrets.token_hex(8), "sk-" + secrets.token_hex(8)
        session = {
            "id": sid,
            "key": key,
            "open": True,
            "calls": 0,
            "rewards": {},
            "opened_version": self.version,
            "group": body.get("group_id") or sid,
            "size": body["group_size"],
            **{k: body.get(k) for k in ("task_id", "purpose", "sampling", "deadline_s")},
        }
        self.sessions[sid] = self.by_key[key] = session
        self.most_open_groups = max(self.most_open_groups, len(self.groups()) - len(self.consumed))
        return web.json_response(
            {
                "session_id": sid,
                "api_key": key,
                "base_url": f"{self.url}/v1",
                "opened_version": self.version,
                "deadline_s": body.get("deadline_s") or 600,
            },
            status=201,
        )

    async def _reward(self, request: web.Request) -> web.Response:
        session = self.sessions[request.match_info["id"]]
        body = await request.json()
        if not session["open"]:
            return web.json_response({"error": {"message": "sealed", "code": "session_sealed"}}, status=409)
        session["rewards"][body["key"]] = body["value"]
        return web.json_response({})

    async def _seal(self, request: web.Request) -> web.Response:
        session = self.sessions[request.match_info["id"]]
        if session["open"]:
            session |= {"open": False, **(await request.json())}
        return web.json_response(self.sealed(session))

    def sealed(self, session: dict[str, Any]) -> dict[str, Any]:
        value = list(session["rewards"].values())[-1] if session["rewards"] else None
        return {
            "state": "sealed",
            "calls": {self.state: session["calls"]},
            "reward_state": "missing" if value is None else "set",
            "reward": value,
            "trained_tokens": self.trained_tokens * session["calls"],
        }

    async def _inspect(self, request: web.Request) -> web.Response:
        session = self.sessions[request.match_info["id"]]
        return web.json_response({"id": session["id"], "calls": [{}] * session["calls"], "sequences": []})

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": self.version,
                "weights_state": "serving",
                "fleet": {"engines": [{"id": 0, "state": "serving"}]},
                "calls": {"total": self.calls, "complete": self.calls, "incomplete": 0},
                "multi_version_calls": 0,
                "sessions": dict(Counter("open" if s["open"] else "sealed" for s in self.sessions.values())),
                "tokens_sampled": 5 * self.calls,
                "trainer": {"staleness": self.staleness[-1]} if self.staleness else None,
            }
        )

    @property
    def calls(self) -> int:
        return sum(s["calls"] for s in self.sessions.values())

    async def _chat(self, request: web.Request) -> web.Response:
        self.headers.append({k.lower(): v for k, v in request.headers.items()})
        key = request.match_info.get("key") or request.headers.get("x-api-key") or ""
        key = key or request.headers.get("authorization", "").removeprefix("Bearer ")
        session = self.by_key.get(key)
        if session is None:
            return web.json_response(
                {"error": {"message": "unknown key", "code": "unauthorized"}}, status=401
            )
        if not session["open"]:
            return web.json_response({"error": {"message": "sealed", "code": "session_sealed"}}, status=409)
        session["calls"] += 1
        content = json.dumps({"session": session["id"], "version": self.version})
        message = {"role": "assistant", "content": content}
        return web.json_response(
            {
                "id": "c",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6},
            }
        )

    def groups(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for s in self.sessions.values():
            if s["purpose"] == "train":
                found.setdefault(s["group"], []).append(s)
        return found

    def ready(self) -> list[str]:
        """Sealed and not void, oldest first (a dict keeps the order of opening)."""
        return [
            g
            for g, members in self.groups().items()
            if g not in self.consumed
            and len(members) == members[0]["size"]
            and not any(s["open"] for s in members)
            and any((r := self.sealed(s))["reward_state"] == "set" and r["trained_tokens"] for s in members)
        ]

    def train_step(self, batch: int) -> bool:
        """One step when the oldest groups are ready; returns whether it was taken.

        Strictly by admission, the simplest rule that keeps η: the i-th group is trained in batch i // batch.
        """
        ready, groups = self.ready(), self.groups()
        waiting = [
            g
            for g, members in groups.items()
            if g not in self.consumed
            and (g in ready or any(s["open"] for s in members) or len(members) < members[0]["size"])
        ]
        if len(waiting) < batch or any(g not in ready for g in waiting[:batch]):
            return False
        for g in waiting[:batch]:
            self.staleness.append(self.version - min(s["opened_version"] for s in groups[g]))
            self.consumed.append(g)
        self.version += 1
        return True
