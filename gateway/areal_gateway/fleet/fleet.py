"""The fleet: which engines there are, how they come and go, and which of them may take a call.

Invariant: an engine serves only while it holds the fleet's version and stamps it; whatever else it is, its
state says so, and why. What becomes of a call is in runner.py, which weights the engines hold in weights.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

from areal_agent.checks import model_folder
from areal_agent.config import RunConfig
from areal_agent.errors import ArealError, ConfigError, EngineError
from areal_agent.launch.machine import detect_platform, plan_engines
from areal_gateway.fleet.adapter import EngineAdapter, write_first_adapter
from areal_gateway.fleet.member import Member
from areal_gateway.fleet.probe import ProbeReply, probe
from areal_gateway.fleet.process import (
    EngineArgs,
    LaunchSpec,
    engine_args,
)
from areal_gateway.fleet.runner import CallRunner
from areal_gateway.fleet.types import (
    Chunk,
    EngineSampling,
    EngineState,
    UnknownEngine,
)
from areal_gateway.fleet.weights import WeightTransaction

DRAINED = "takes no new calls"


class Fleet:
    """The engines of a run. `start`, then `generate`; new weights through `weights`; `stop` at the end.

    Args:
        config: of the run; sections `fleet`, `weights`, `gateway.hold_timeout_s`, and `model`.
        run_dir: its `logs/` gets engine-N.log.
        on_event: called with {"type": "engine" | "weights" | "fleet", ...} as things happen.
        command: builds an engine's command line; the default is vLLM's for the platform.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        on_event: Callable[[dict[str, Any]], None],
        *,
        command: Callable[[LaunchSpec], EngineArgs] = engine_args,
    ) -> None:
        self.config = config
        self.run_dir = Path(run_dir)
        self.on_event = on_event
        self.version = 0
        self.error: str | None = None
        """Why the fleet is held, when no engine survived an update."""
        self.members: list[Member] = []
        self.weights = WeightTransaction(self, config.weights)
        self._command = command
        self._platform = "cpu"
        self._adapter: EngineAdapter | None = None
        self.calls = CallRunner(self, config)
        self._attached = itertools.count()
        self._held = False
        self._stopped = False
        self._change = asyncio.Event()
        self._tasks: dict[Member, asyncio.Task[None]] = {}

    # life

    async def start(self) -> None:
        """Start or attach every engine and wait until all serve.

        Raises:
            ConfigError: the model cannot be read, or the engines do not fit.
            EngineError: an engine did not come up; whatever was started is ended again.
        """
        f = self.config.fleet
        self._platform = detect_platform(self.config)
        count, why = plan_engines(self.config)
        lora = self.config.served_adapter
        if count:
            model = model_folder(self.config.model)
            if lora is not None:
                self._adapter = write_first_adapter(self.run_dir.absolute() / "adapter", model, lora)
        self._emit("fleet", engines=count + len(f.attach), reason=why)
        self.members = [Member(f"engine-{i}", index=i, driver=f.driver) for i in range(count)]
        self.members += [self._newcomer(url) for url in f.attach]
        starts = [asyncio.ensure_future(self._bring_up(m)) for m in self.members]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.stop()
            raise
        versions = {m.version for m in self.members if not m.tainted}
        if len(versions) > 1:
            held = {m.url: m.version for m in self.members}
            await self.stop()
            raise ConfigError(f"attached engines hold different versions: {held}")
        self.version = (versions.pop() if versions else 0) or 0
        for member in self.members:
            if member.tainted:
                self._set_state(
                    member, EngineState.STARTING, "an update broke off in it; it waits for weights"
                )
            else:
                self._set_state(member, EngineState.SERVING)
            self._watch_over(member)

    async def stop(self) -> None:
        """End every engine that is ours; attached ones are let go, resumed. Idempotent."""
        self._stopped = True
        await self.weights.close()
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        results = await asyncio.gather(*(m.end() for m in self.members), return_exceptions=True)
        for member in self.members:
            self._set_state(member, EngineState.GONE, "the fleet stopped")
        for result in results:
            if isinstance(result, BaseException):
                raise EngineError(f"an engine did not end: {result}") from result

    async def _bring_up(self, member: Member) -> None:
        f = self.config.fleet
        if member.attached:
            try:
                await member.come_up(time.monotonic() + f.start_timeout_s)
            except EngineError as e:
                raise EngineError(f"cannot attach {member.url}: {e}") from e
            return
        spec = LaunchSpec(
            model=self.config.model,
            port=0,
            index=member.index,
            engines=sum(not m.attached for m in self.members),
            platform=self._platform,
            trainer_ranks=self.config.trainer.ranks,
            fleet=f,
            seed=(self.config.rollout.seed * 1009 + member.index * 101 + member.starts) % 2**31,
            adapter=self._adapter,
        )
        log = self.run_dir / "logs" / f"{member.id}.log"
        await member.launch(spec, self._command, log, f.start_timeout_s)

    async def _supervised(self, member: Member) -> None:
        try:
            await self._supervise(member)
        except Exception as e:
            await self._take_out(member, EngineState.GONE, f"its supervisor failed: {e!r}")
            raise

    async def _supervise(self, member: Member) -> None:
        """Watch one engine; end it when it is lost, and start it again, up to max_restarts times."""
        f = self.config.fleet
        while not self._stopped:
            reason = await member.watch(f.probe_s, self._notify)
            member.forgive()
            await self._take_out(member, EngineState.GONE, reason)
            while not member.ready:
                if member.restarts >= f.max_restarts:
                    tried = f"{member.restarts} restarts used up (fleet.max_restarts)"
                    self._set_state(member, EngineState.GONE, f"{tried}; last: {member.reason}")
                    return
                await asyncio.sleep(member.backoff_s())
                member.restarts += 1
                self._set_state(
                    member, EngineState.STARTING, f"restart {member.restarts} of {f.max_restarts}"
                )
                try:
                    await self._bring_up(member)
                except ArealError as e:
                    await self._take_out(member, EngineState.GONE, str(e))
            member.suspect.clear()
            self._admit(member)

    def _admit(self, member: Member) -> None:
        """An engine that came up serves if it holds the current weights, else waits for them."""
        if member.drained:
            self._set_state(member, EngineState.DRAINING, DRAINED)
        elif member.version == self.version and not self.weights.running:
            self._set_state(member, EngineState.SERVING)
        else:
            self._set_state(member, EngineState.STARTING, f"waits for the weights of version {self.version}")
            self.weights.saved.offer()

    def _watch_over(self, member: Member) -> None:
        self._tasks[member] = asyncio.create_task(self._supervised(member), name=f"supervise {member.id}")

    # joining and leaving at run time

    def _newcomer(self, url: str) -> Member:
        return Member(f"attached-{next(self._attached)}", url=url, driver=self.config.fleet.driver)

    async def join(self, url: str) -> dict[str, Any]:
        """Attach an engine that somebody runs, or take one that was drained back; its status.

        It serves once it holds the fleet's weights. At version 0 those are the model folder's, which it was
        started with. Later it waits for a push, whatever version its label names: the label may be of another
        run. The trainer, which looks for waiting engines while it waits for a batch, pushes the current
        version to those alone; otherwise the next update reaches it.

        Raises EngineError: it does not answer, or cannot be driven.
        """
        url = url.rstrip("/")
        known = next((m for m in self.members if m.url == url), None)
        if known is not None:
            known.drained = False
            if known.ready and known.state is EngineState.DRAINING:
                self._admit(known)
            return known.status()
        member = self._newcomer(url)
        self.members.append(member)
        self._set_state(member, EngineState.STARTING, "joins")
        try:
            await self._bring_up(member)
            if member not in self.members:
                raise EngineError(f"engine {url} was told to leave while it joined")
        except BaseException as e:
            if member in self.members:
                self.members.remove(member)
            self._set_state(member, EngineState.GONE, f"did not join: {e}")
            await member.end()
            raise
        if self.version:
            member.version = None
        self._admit(member)
        self._watch_over(member)
        return member.status()

    async def drain(self, id: str) -> dict[str, Any]:
        """Give an engine no new call; those that it has go on to their end. It takes part in updates as before.

        Raises UnknownEngine.
        """
        member = self._named(id)
        member.drained = True
        if member.state is EngineState.SERVING:
            self._set_state(member, EngineState.DRAINING, DRAINED)
        return member.status()

    async def leave(self, id: str) -> dict[str, Any]:
        """Take an engine out for good: ours is ended, an attached one let go. Calls that it has go on elsewhere;
        drain it first to let them end where they are. Raises UnknownEngine."""
        member = self._named(id)
        self.members.remove(member)
        if (task := self._tasks.pop(member, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        # Whoever asked may hang up: an engine of ours is ended all the same.
        await asyncio.shield(
            asyncio.ensure_future(self._take_out(member, EngineState.GONE, "it left the fleet"))
        )
        return member.status()

    def _named(self, id: str) -> Member:
        for member in self.members:
            if id in (member.id, member.url):
                return member
        raise UnknownEngine(f"no engine is called {id}; there are {', '.join(m.id for m in self.members)}")

    async def _take_out(self, member: Member, state: EngineState, reason: str) -> None:
        member.ready = False
        self._set_state(member, state, reason)
        try:
            await member.end()
        except TimeoutError as e:
            self._emit("engine", id=member.id, state=str(state), reason=f"cannot be ended: {e}")

    # what the weight transaction does to engines

    def quarantine(self, member: Member, reason: str) -> None:
        """Nothing of this engine is trusted any more: its calls are cut, its supervisor ends and restarts it."""
        if member.state is EngineState.QUARANTINED:
            return
        member.ready = False
        member.tainted = member.attached
        if member.process is not None:
            member.process.request_stop()
        self._set_state(member, EngineState.QUARANTINED, reason)

    def serve_current(self) -> None:
        """Let every ready engine that holds and stamps the fleet's version serve."""
        for member in self.members:
            if member.ready and member.version == self.version:
                state = EngineState.DRAINING if member.drained else EngineState.SERVING
                self._set_state(member, state, DRAINED if member.drained else "")

    def hold(self) -> None:
        """Admit no call until `release`."""
        self._held = True

    def release(self) -> None:
        self._held = False
        self._notify()

    async def wait_ready(self, timeout_s: float) -> list[Member]:
        """Engines that can take new weights: serving ones and those that wait for some."""

        def ready() -> list[Member]:
            return [m for m in self.members if m.ready and m.state is not EngineState.QUARANTINED]

        await self._until(lambda: ready() or not self._hope(), timeout_s)
        return ready()

    def _hope(self) -> bool:
        """Whether some engine is still coming up."""
        return any(m.restarts < self.config.fleet.max_restarts for m in self.members)

    # calls

    def generate(
        self,
        *,
        session_id: str,
        prompt_ids: Sequence[int],
        sampling: EngineSampling,
        on_engine: Callable[[str], None] | None = None,
    ) -> AsyncGenerator[Chunk]:
        """Stream one reply; the last chunk has the finish reason and the spans over all of it.

        `on_engine` gets the id of each engine that works on it. Closing the iterator drops the work.

        Raises:
            FleetUnavailable: no engine served within gateway.hold_timeout_s.
            EngineError: the engine refused the request, or the reply cannot be completed exactly.
        """
        return self.calls.run(session_id, prompt_ids, sampling, on_engine)

    async def probe(self, prompts: list[list[int]], sampling: EngineSampling) -> list[ProbeReply]:
        """Every prompt on every serving engine; see areal_gateway.fleet.probe."""

        def left_out(member: Member, reason: str) -> None:
            self._emit("probe_left_out", engine=member.id, reason=reason)

        return await probe(self._serving(), prompts, sampling, left_out)

    async def wait_routable(self, timeout_s: float) -> bool:
        """Until a call may be given to an engine; False when time ran out."""
        return await self._until(lambda: not self._held and self.routable(), timeout_s)

    def why_not(self) -> str:
        """Why no call can be given to any engine."""
        states = "; ".join(f"{m.id} is {m.state} ({m.reason})" for m in self.members)
        return self.error or states or "the fleet has no engine; `areal-agent fleet join` adds one"

    @property
    def serves(self) -> bool:
        """Whether some engine serves."""
        return bool(self._serving())

    def _serving(self) -> list[Member]:
        return [m for m in self.members if m.state is EngineState.SERVING]

    def routable(self) -> list[Member]:
        """Serving engines to which no connection has failed since they last answered a probe."""
        return [m for m in self._serving() if not m.suspect.is_set()]

    # what there is to see

    @property
    def state(self) -> str:
        """starting, serving, stopped, held(error), or the update's phase: holding, paused, loading, verifying."""
        if self._stopped:
            return "stopped"
        if self.weights.phase != "serving":
            return self.weights.phase
        if self._serving():
            return "serving"
        return "held(error)" if self.error else "starting"

    def status(self) -> dict[str, Any]:
        """{version, state, error, needs_weights, reprefilled, engines: [{id, url, state, version, running, ...}]}.

        `needs_weights`: an engine waits for the current weights: somebody has to push them.
        """
        engines = [m.status() for m in self.members]
        waits = any(e["waits_for_weights"] for e in engines)
        return {
            "version": self.version,
            "state": self.state,
            "error": self.error,
            "needs_weights": waits and not self.weights.running and not self.weights.saved.has(self.version),
            "reprefilled": dict(self.calls.prefilled_again),
            "engines": engines,
        }

    def _set_state(self, member: Member, state: EngineState, reason: str = "") -> None:
        if (member.state, member.reason) == (state, reason):
            return
        member.state, member.reason = state, reason
        if state is EngineState.SERVING:
            # A newcomer that counted from zero would get every new session until it caught up.
            member.assigned = max(member.assigned, min(m.assigned for m in self._serving()))
        self._emit(
            "engine", id=member.id, url=member.url, state=str(state), version=member.version, reason=reason
        )
        self._notify()

    def _emit(self, type: str, **fields: Any) -> None:
        self.on_event({"type": type, **fields})

    def emit_moved(self, session_id: str, member: Member, tokens: int) -> None:
        """A call with `tokens` of its reply left an engine that was lost."""
        self._emit("call_moved", session_id=session_id, engine=member.id, tokens=tokens)

    def emit_weights(self, **fields: Any) -> None:
        """An event of the weight transaction."""
        self._emit("weights", **fields)

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _until(self, true: Callable[[], object], timeout_s: float) -> bool:
        """Wait until something that changed makes it true; False when time ran out."""
        if true():  # nearly always, before every call: no timer for that
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not true():
                    await self._change.wait()
        return bool(true())
