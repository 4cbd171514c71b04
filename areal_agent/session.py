"""The gateway's admin plane as a client, and the handle on one session.

Invariant: every request has a deadline, and whatever goes wrong is a GatewayError with the status and
code. Only what may be repeated is repeated: opening a session is retried when the connection was never
made, rewards and seals (idempotent by key and by state) also when the answer was lost.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from areal_agent.errors import GatewayError
from areal_agent.tls import client_context

Purpose = Literal["train", "eval", "rollout"]
Outcome = Literal["finished", "failed", "timeout"]

RETRIES = 3
"""Attempts after the first; with the doubling pause below they span about 1.5 s."""

RETRY_PAUSE_S = 0.2


CONSTRAINED = (
    "every call of a whole group was constrained (a JSON format, a forced tool, a greedy or cut distribution), and "
    "such calls are never trained: if the agent only makes those, nothing is learned. gateway.constrain: false "
    "serves them unconstrained and trains them; sampling.pinned: true keeps the sampling the run's"
)


class AdminHttp(httpx.AsyncClient):
    """The admin plane's own transport; `observe` leaves it alone, whatever session the caller is in."""

    areal_unobserved = True


@dataclass(frozen=True, slots=True)
class Sealed:
    """What the gateway says of a session once nothing about it can change.

    Attributes:
        calls: number of calls by state (`complete`, `incomplete`, ...).
        reward_state: `set` or `missing`.
        reward: the value when set.
        trained_tokens: sampled tokens that carry loss; 0 when there is nothing to train on.
    """

    state: str
    calls: Mapping[str, int]
    reward_state: str
    reward: float | None
    trained_tokens: int

    @property
    def calls_total(self) -> int:
        return sum(self.calls.values())

    @property
    def all_constrained(self) -> bool:
        """Whether every call was sampled under a constraint, so that nothing of it can be trained."""
        return 0 < self.calls_total == self.calls.get("constrained", 0)

    @property
    def trainable(self) -> bool:
        return self.reward_state == "set" and self.trained_tokens > 0


@dataclass(slots=True)
class Session:
    """One run of the agent on one task; whoever holds `api_key` speaks for it.

    Attributes:
        id, task_id, group_id: names in the ledger.
        base_url: what an OpenAI client is pointed at, ending in /v1.
        api_key: reaches this session only.
        opened_version: policy version when it was opened.
        deadline_s: seconds from opening until the gateway seals it by itself.
    """

    gateway: GatewayClient = field(repr=False)
    id: str
    api_key: str = field(repr=False)
    base_url: str
    opened_version: int
    deadline_s: float
    task_id: str = ""
    group_id: str = ""
    purpose: Purpose = "train"

    async def reward(
        self,
        value: float | None,
        *,
        key: str | None = None,
        name: str = "reward",
        response_id: str | None = None,
        call_id: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Record a reward; None means missing. `rewards.rule` says what several come to.

        Args:
            key: makes a repeated request count once; a fresh one is made when not given. The key's last value
                counts.
            name: `reward` is trained on; other names are kept and shown.
            response_id, call_id: of this reply (`response.id` of any SDK) or call only. labels: of each call that
                carries all of them. None of these: of the session.

        Raises GatewayError (409) once the session is sealed.
        """
        body: dict[str, Any] = {"value": value, "key": key or uuid.uuid4().hex, "name": name}
        if response_id is not None:
            body["response_id"] = response_id
        if call_id is not None:
            body["call_id"] = call_id
        if labels:
            body["labels"] = dict(labels)
        await self.gateway.post(f"/admin/sessions/{self.id}/rewards", body, repeat=True)

    async def seal(self, outcome: Outcome = "finished", error: str | None = None) -> Sealed:
        """End the session: calls in flight are cancelled, later ones refused. Idempotent."""
        body: dict[str, Any] = {"outcome": outcome}
        if error is not None:
            body["error"] = error
        answer = await self.gateway.post(f"/admin/sessions/{self.id}/seal", body, repeat=True)
        return Sealed(
            state=str(answer.get("state", "sealed")),
            calls=dict(answer.get("calls") or {}),
            reward_state=str(answer.get("reward_state", "missing")),
            reward=answer.get("reward"),
            trained_tokens=int(answer.get("trained_tokens") or 0),
        )

    async def inspect(self, *, trajectory: bool = False) -> dict[str, Any]:
        """State, labels, calls and reward; with `trajectory`, the token sequences as well."""
        query = "?trajectory=1" if trajectory else ""
        return await self.gateway.get(f"/admin/sessions/{self.id}{query}")


class GatewayClient:
    """The admin plane of one gateway. Use as an async context manager, or call `aclose`."""

    def __init__(
        self,
        url: str,
        admin_key: str,
        *,
        timeout_s: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Args:
        url: origin of the gateway, such as http://127.0.0.1:8123.
        timeout_s: deadline of each request.
        transport: for tests against an in-process application.
        """
        self.url = url.rstrip("/")
        self._http = AdminHttp(
            base_url=self.url,
            headers={"authorization": f"Bearer {admin_key}"},
            timeout=timeout_s,
            transport=transport,
            verify=client_context(self.url),
            trust_env=False,  # a proxy of the environment has no business between us and loopback
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=10.0),
        )

    async def __aenter__(self) -> GatewayClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def open_session(
        self,
        task_id: str,
        *,
        purpose: Purpose = "train",
        group_id: str | None = None,
        group_size: int = 1,
        sampling: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Session:
        """Open one session of a group.

        Args:
            group_size: how many sessions the group has; it is ready once all of them are sealed.
            sampling: overrides the run's, e.g. {"temperature": 0} for a greedy evaluation.

        Raises:
            GatewayError: refused, or not reachable.
        """
        body: dict[str, Any] = {"task_id": task_id, "purpose": purpose, "group_size": group_size}
        optional = {"group_id": group_id, "sampling": sampling, "deadline_s": deadline_s, "labels": labels}
        body |= {k: dict(v) if isinstance(v, Mapping) else v for k, v in optional.items() if v is not None}
        answer = await self.post("/admin/sessions", body, repeat=False)
        try:
            return Session(
                gateway=self,
                id=answer["session_id"],
                api_key=answer["api_key"],
                base_url=answer["base_url"],
                opened_version=int(answer["opened_version"]),
                deadline_s=float(answer.get("deadline_s") or deadline_s or math.inf),
                task_id=task_id,
                group_id=group_id or "",
                purpose=purpose,
            )
        except (KeyError, TypeError, ValueError) as e:
            raise GatewayError(f"the gateway opened a session but its answer lacks {e}") from e

    async def status(self) -> dict[str, Any]:
        """Version, fleet, counts of calls, sessions and groups, the trainer's last metrics."""
        return await self.get("/admin/status")

    async def take_over(self, version: int, *, abandon: bool = True) -> dict[str, str]:
        """For a resumed run, before anything is opened: the state of every training group, by id.

        The gateway rewinds its leases to `version` and, with `abandon`, gives up what the earlier run left
        open (what a service began, it may go on with).
        """
        if abandon:
            await self.post("/admin/groups/abandon", {}, repeat=True)
        await self.post("/admin/trajectories/rewind", {"version": version}, repeat=True)
        return dict((await self.get("/admin/groups"))["groups"])

    async def healthy(self) -> bool:
        """Whether the gateway answers at all (its engines may still be starting)."""
        try:
            return (await self._http.get("/health", timeout=5.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def get(self, path: str) -> dict[str, Any]:
        return await self._request("GET", path, None, repeat=True)

    async def post(self, path: str, body: Mapping[str, Any], *, repeat: bool) -> dict[str, Any]:
        """Args: repeat: whether a request whose answer was lost may be sent again."""
        return await self._request("POST", path, body, repeat=repeat)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None, *, repeat: bool) -> dict:
        for attempt in range(RETRIES + 1):
            try:
                response = await self._http.request(method, path, json=body)
                break
            except (httpx.TransportError, httpx.TimeoutException) as e:
                may = repeat or isinstance(e, (httpx.ConnectError, httpx.ConnectTimeout))
                if not may or attempt == RETRIES:
                    reason = str(e) or type(e).__name__
                    raise GatewayError(
                        f"the gateway at {self.url} did not answer {method} {path}: {reason}; "
                        "look at logs/gateway.log in the run folder",
                        code="unreachable",
                    ) from e
                await asyncio.sleep(RETRY_PAUSE_S * 2**attempt)
        else:  # pragma: no cover - the loop breaks or raises
            raise AssertionError
        return _answer(response, f"{method} {path}")


def _answer(response: httpx.Response, what: str) -> dict[str, Any]:
    try:
        data = response.json() if response.content else {}
    except ValueError:
        data = None
    if response.is_success and isinstance(data, dict):
        return data
    error = data.get("error") if isinstance(data, dict) else None
    error = error if isinstance(error, dict) else {}
    message = error.get("message") or response.text[:300] or response.reason_phrase
    raise GatewayError(
        f"the gateway refused {what} with status {response.status_code}: {message}",
        status=response.status_code,
        code=str(error.get("code") or ""),
    )
