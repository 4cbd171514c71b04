"""The gateway's parts, put together once. The two planes (agent, admin) are handlers over this.

Invariant: state lives here, in one object per gateway, and all of it can be rebuilt from the ledger.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from aiohttp import web

from areal_agent.config import RunConfig
from areal_agent.weights import Manifest
from areal_gateway.calls import Calls, Fleet
from areal_gateway.credit import Credit
from areal_gateway.events import EventBus
from areal_gateway.fleet.probe import ProbeReply
from areal_gateway.fleet.types import EngineSampling
from areal_gateway.leases import Leases
from areal_gateway.ledger import Ledger
from areal_gateway.metrics import FleetCollector, Metrics
from areal_gateway.online import TASK as ONLINE_TASK
from areal_gateway.online import Online
from areal_gateway.sessions import Sessions
from areal_gateway.tokens import Tokens

log = logging.getLogger(__name__)

WATCH_S = 0.5
"""Between two rounds of the watchdog: how late a deadline may be enforced."""

CALL_SLACK_S = 5.0
"""The fleet ends a call that is late; this much later the gateway does, should the fleet not have."""


class Weights(Protocol):
    """The weight transaction, as the admin plane calls it."""

    async def begin(
        self, *, version: int, manifest: Manifest, store: dict[str, Any], backend: str, force: bool = False
    ) -> dict[str, Any]: ...
    async def commit(self, update_id: str, checksums: list[str]) -> dict[str, Any]: ...
    async def abort(self, update_id: str, reason: str) -> dict[str, Any]: ...


class GatewayFleet(Fleet, Protocol):
    """The engines, as the whole gateway sees them."""

    @property
    def state(self) -> str: ...
    @property
    def weights(self) -> Weights: ...
    async def probe(self, prompts: list[list[int]], sampling: EngineSampling) -> list[ProbeReply]: ...
    def status(self) -> dict[str, Any]: ...
    async def join(self, url: str) -> dict[str, Any]: ...
    async def drain(self, id: str) -> dict[str, Any]: ...
    async def leave(self, id: str) -> dict[str, Any]: ...


class Gateway:
    """Everything one gateway is, without HTTP."""

    def __init__(
        self,
        *,
        config: RunConfig,
        fleet: GatewayFleet,
        ledger: Ledger,
        tokens: Tokens,
        admin_key: str,
        events: EventBus,
        project_key: str | None = None,
    ) -> None:
        self.config = config
        self.fleet = fleet
        self.ledger = ledger
        self.tokens = tokens
        self.admin_key = admin_key
        self.project_key = project_key
        self.events = events
        self.metrics = Metrics()
        self.metrics.registry.register(FleetCollector(fleet.status))
        credit = Credit.of(config)
        self.leases = Leases(ledger, events, self.metrics, credit, shed=config.online.enabled)
        self.sessions = Sessions(
            ledger,
            events,
            self.metrics,
            grace_s=config.rollout.reward_timeout_s,
            idle_s=lambda s: (
                config.online.idle_timeout_s
                if s.task_id.startswith(ONLINE_TASK)
                else config.rollout.idle_timeout_s
            ),
            seed=config.sampling.seed,
            credit=credit,
            on_open=self.leases.opened,
            on_seal=self.leases.sealed,
            on_withdraw=self.leases.withdrawn,
        )
        self.calls = Calls(
            fleet=fleet,
            tokens=tokens,
            ledger=ledger,
            events=events,
            metrics=self.metrics,
            call_timeout_s=config.fleet.call_timeout_s + config.gateway.hold_timeout_s + CALL_SLACK_S,
        )
        self.trainer: dict[str, Any] | None = None
        """The trainer's last metrics."""
        self.last_error: str | None = None
        self.model = config.model.rstrip("/").rpartition("/")[2] or "policy"
        self.sessions.restore()
        self.leases.restore()
        for session in self.sessions.running():
            self.calls.restore(session)
        self.online = Online(config, self.sessions, ledger, lambda: fleet.version)

    async def watch(self) -> None:
        """Runs for ever: deadlines of sessions and leases, and the event loop's lag."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.metrics.watch_lag())
            group.create_task(self._enforce())

    async def _enforce(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                self.leases.expire()
                await self.sessions.enforce_deadlines()
            except Exception:  # one session's trouble must not end the watch over all others
                log.exception("the watchdog failed this time; it goes on")

    def stop_calls(self) -> list[asyncio.Task[None]]:
        """Abort everything in flight; the tasks end once their calls are in the ledger's queue."""
        self.calls.stopping = True
        tasks = []
        for session in self.sessions.running():
            for exchange in list(session.running):
                if exchange.task is not None:
                    exchange.task.cancel()
                    tasks.append(exchange.task)
        return tasks

    def status(self) -> dict[str, Any]:
        fleet = self.fleet.status()
        totals = self.calls.totals
        return {
            "version": self.fleet.version,
            "weights_state": self.fleet.state,
            "fleet": fleet,
            "calls": {"total": sum(totals.values()), **totals, "running": self.calls.running},
            "multi_version_calls": self.leases.multi_version_calls,
            "sessions": {"open": self.sessions.open_count, "sealed": self.sessions.sealed_count},
            "groups": self.leases.counts(),
            "tokens_sampled": self.calls.tokens_sampled,
            "trainer": self.trainer,
            "last_error": fleet.get("error") or self.last_error,
        }


GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway", Gateway)
