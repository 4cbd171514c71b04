"""One engine of the fleet through its life: started, warmed up, watched, ended, started again.

Invariant: `state` is SERVING only while the engine holds the fleet's version and stamps it. An engine that
came up with older weights is `ready` but STARTING until a weight update reaches it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from areal_agent.errors import ArealError, ConfigError, EngineError
from areal_agent.launch.process import Guarded
from areal_gateway.fleet.drivers import Choice, drive
from areal_gateway.fleet.http import EngineHTTP
from areal_gateway.fleet.process import (
    MODEL_NAME,
    EngineArgs,
    LaunchSpec,
    free_port,
    last_words,
    port_clash,
)
from areal_gateway.fleet.protocol import EngineDriver, EngineRefused
from areal_gateway.fleet.types import EngineSampling, EngineState

T = TypeVar("T")

PORT_TRIES = 3
PROBE_TIMEOUT_S = 5.0
PROBES_MISSED = 3
"""Probes in a row without an answer before an engine counts as lost; a busy one may miss one."""

POLL_S = 0.1
"""Between looks at whether the process still lives."""

UNKNOWN = -1
"""Version of an engine whose weights may be of two versions."""

BACKOFF_S = 1.0
BACKOFF_MAX_S = 30.0

STEADY_S = 600.0
"""An engine that was up this long has shown that it can: its next loss counts as its first."""

WARM_UP = EngineSampling(max_tokens=4, temperature=1.0, extra={"ignore_eos": True})
"""The shape of later requests, logprobs included: the first of a kind compiles for 2-20 s, and a pause
would wait for it."""


class Member:
    """An engine, ours (with a process) or attached (without).

    Attributes:
        version: of the weights it holds; None until known.
        ready: it is up, warmed up and answers; it may still lack the current weights.
        incarnation: counts starts; a group of an earlier one is void.
        index: its place among the engines that we start; decides its devices and its seed.
        drained: somebody wants it to take no new calls.
        calls: replies it works on. `assigned`: sessions routed to it so far.
        tainted: an update failed inside it, so its weights may be of two versions; only a whole new set of
            weights clears this. (An engine of ours is started anew instead.)
        reason: why it is not serving, for people.
    """

    def __init__(self, id: str, *, index: int = 0, url: str = "", driver: Choice = "auto") -> None:
        self.id, self.index = id, index
        self.attached = bool(url)
        self._http = EngineHTTP(url, None)
        self._driver: EngineDriver | None = None
        self._choice: Choice = driver
        self.process: Guarded | None = None
        self.state = EngineState.STARTING
        self.ready = False
        self.version: int | None = None
        self.world_size = 1
        self.tainted = False
        self.drained = False
        self.incarnation = 0
        self.calls = 0
        self.assigned = 0
        self.restarts = 0
        self.starts = 0
        self.reason = ""
        self.started_in_s: float | None = None
        self.up_since = 0.0
        self.suspect = asyncio.Event()
        """Set by whoever saw a connection to it fail: it is probed at once, and gets no call meanwhile."""

    @property
    def url(self) -> str:
        return self._http.url

    @property
    def client(self) -> EngineDriver:
        """Raises EngineError before it came up for the first time."""
        if self._driver is None:
            raise EngineError(f"{self.id} has not come up")
        return self._driver

    def status(self) -> dict[str, object]:
        return {
            "id": self.id,
            "url": self.url,
            "state": str(self.state),
            "version": self.version,
            "driver": self._driver.kind if self._driver is not None else None,
            "running": self.calls,
            "pid": self.process.pid if self.process is not None else None,
            "restarts": self.restarts,
            "waits_for_weights": self.ready and self.state is EngineState.STARTING,
            "reason": self.reason,
            "started_in_s": self.started_in_s,
        }

    async def launch(
        self, spec: LaunchSpec, command: Callable[[LaunchSpec], EngineArgs], log: Path, timeout_s: float
    ) -> None:
        """Start the process, wait until it answers, warm it up. Raises EngineError with the log's reason."""
        began = time.monotonic()
        self.starts += 1
        for attempt in itertools.count(1):
            spec = replace(spec, port=free_port())
            args = command(spec)
            await self._close()
            self._http = EngineHTTP(f"http://127.0.0.1:{spec.port}", MODEL_NAME)
            offset = _size(log)
            try:
                # An engine has no use for the run's keys.
                env = {k: v for k, v in os.environ.items() if not k.startswith("AREAL_")} | args.env
                self.process = await Guarded.astart(args.command, env=env, log_path=log)
            except ArealError as e:
                raise EngineError(f"{self.id}: {e}") from e
            try:
                await self.come_up(began + timeout_s)
                break
            except EngineError as e:
                lines = _since(log, offset)
                died = self.process.poll() is not None
                await self.end()
                if died and port_clash(lines) and attempt < PORT_TRIES:
                    continue
                raise EngineError(f"{self.id} did not start: {e}; {log}: {last_words(lines)}") from e
            except asyncio.CancelledError:
                self.process.request_stop()
                raise
        self.started_in_s = round(time.monotonic() - began, 1)

    async def come_up(self, deadline: float) -> None:
        """Wait for /health, then decode once with the request shape used later."""
        while True:
            if self.process is not None and (code := self.process.poll()) is not None:
                raise EngineError(f"its process ended with code {code}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineError("it was not ready in time (fleet.start_timeout_s)")
            try:
                await self._http.health(min(PROBE_TIMEOUT_S, left))
                break
            except EngineError:
                await asyncio.sleep(min(0.2, max(0.0, left)))
        left = max(1.0, deadline - time.monotonic())
        if self._http.model is None:
            self._http.model = await self._http.model_name(PROBE_TIMEOUT_S)
        if self._driver is not None:
            await self._driver.close()
        # The server makes its description when it is first asked for; a busy machine takes seconds over it.
        driver = self._driver = await drive(self.url, self._http.model, self._choice, left)
        self.world_size = await driver.world_size(PROBE_TIMEOUT_S)
        held = await driver.held_version(PROBE_TIMEOUT_S) if self.attached else None
        if self.attached and await self._broke_off(held):
            self.tainted = True
        self.version = UNKNOWN if self.tainted else max(held or 0, 0)
        await driver.stamp(self.version, PROBE_TIMEOUT_S)
        if not self.tainted:
            if self.attached:
                await driver.resume(PROBE_TIMEOUT_S)  # whoever paused it may be gone
            async for _ in driver.generate([1, 2, 3, 4], WARM_UP, left):
                pass
        self.incarnation += 1
        self.up_since = time.monotonic()
        self.ready = True

    async def _broke_off(self, stamped: int | None) -> bool:
        """Whether a gateway died here within an update: what is stamped is then not what the workers hold."""
        try:
            workers = await self.client.rpc("areal_status", {}, PROBE_TIMEOUT_S)
        except EngineRefused:  # it has no worker extension, so nobody loaded anything
            return False
        holds = {w.get("holds") for w in workers}
        return holds != {None} and holds != {stamped}

    async def watch(self, probe_s: float, cleared: Callable[[], None]) -> str:
        """Returns when the engine is lost or was quarantined, with the reason.

        `cleared` is called when a probe clears it of a suspicion.
        """
        missed = 0
        next_probe = time.monotonic() + probe_s
        while True:
            if self.state is EngineState.QUARANTINED:
                return self.reason
            if self.process is not None and (code := self.process.poll()) is not None:
                return f"its process ended with code {code}"
            if (self.suspect.is_set() and not missed) or time.monotonic() >= next_probe:
                try:
                    await self.client.health(PROBE_TIMEOUT_S)
                    missed = 0
                    if self.suspect.is_set():
                        self.suspect.clear()
                        cleared()
                except EngineRefused as e:  # vLLM answers 503 once its core is dead
                    return f"it reports itself dead: {e}"
                except EngineError as e:
                    missed += 1
                    if missed >= PROBES_MISSED:
                        return f"{missed} probes failed: {e}"
                next_probe = time.monotonic() + (probe_s if missed == 0 else min(probe_s, 0.3))
            await asyncio.sleep(POLL_S)

    async def end(self) -> None:
        """End the process, if it is ours, and cut every connection to it."""
        self.ready = False
        process, self.process = self.process, None
        if process is not None:
            await process.aterminate()
        await self._close()

    async def _close(self) -> None:
        await self._http.close()
        if self._driver is not None:
            await self._driver.close()

    def forgive(self) -> None:
        """Forget restarts that lie before a long time of being up."""
        if self.ready and time.monotonic() - self.up_since >= STEADY_S:
            self.restarts = 0

    def backoff_s(self) -> float:
        return min(BACKOFF_MAX_S, BACKOFF_S * 2**self.restarts)


async def each(members: list[Member], do: Callable[[Member], Awaitable[T]]) -> dict[Member, T | EngineError]:
    """Do it on all at once; a member's EngineError is its result."""

    async def one(member: Member) -> T | EngineError:
        try:
            return await do(member)
        except EngineError as e:
            return e

    return dict(zip(members, await asyncio.gather(*map(one, members)), strict=True))


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _since(log: Path, offset: int) -> list[str]:
    try:
        with log.open("rb") as f:
            f.seek(offset)
            return f.read().decode(errors="replace").splitlines()
    except OSError as e:
        raise ConfigError(f"cannot read the engine's log {log}: {e}") from e
