"""The fleet: which engines there are, which of them takes a call, and what becomes of a call they lose.

Invariant: a call is given only to an engine that serves the fleet's version; a reply continued on another
engine consists of exactly the tokens that were sampled, each under the version that its engine had.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_agent.checks import model_folder
from areal_agent.config import RunConfig
from areal_agent.errors import ArealError, ConfigError, EngineError
from areal_agent.launch.machine import detect_platform, plan_engines
from areal_gateway.fleet.engine import EngineLost
from areal_gateway.fleet.member import Member
from areal_gateway.fleet.probe import ProbeReply, probe
from areal_gateway.fleet.process import (
    EngineArgs,
    LaunchSpec,
    engine_args,
)
from areal_gateway.fleet.types import Chunk, EngineSampling, EngineState, FleetUnavailable, Span
from areal_gateway.fleet.weights import WeightTransaction

SESSIONS_REMEMBERED = 65536
"""Sessions whose engine is remembered; the least recently used is forgotten first."""

CONTINUATIONS = 5
"""Engines one call may lose before it fails."""

NOT_CONTINUABLE = ("presence_penalty", "frequency_penalty", "bad_words", "structured_outputs")
"""Sampling settings that look at the reply so far, which after a continuation is part of the prompt."""


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
        self._affinity: OrderedDict[str, Member] = OrderedDict()
        self._held = False
        self._stopped = False
        self._change = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

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
        if count:
            model_folder(self.config.model)
        self._emit("fleet", engines=count + len(f.attach), reason=why)
        self.members = [Member(f"engine-{i}") for i in range(count)]
        self.members += [Member(f"attached-{i}", url=url, model=None) for i, url in enumerate(f.attach)]
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
            self._tasks.append(asyncio.create_task(self._supervised(member), name=f"supervise {member.id}"))

    async def stop(self) -> None:
        """End every engine that is ours; attached ones are let go, resumed. Idempotent."""
        self._stopped = True
        await self.weights.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        results = await asyncio.gather(*(m.end() for m in self.members), return_exceptions=True)
        for member in self.members:
            self._set_state(member, EngineState.GONE, "the fleet stopped")
            await member.client.close()
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
            index=self.members.index(member),
            engines=sum(not m.attached for m in self.members),
            platform=self._platform,
            trainer_ranks=self.config.trainer.ranks,
            fleet=f,
            seed=(self.config.rollout.seed * 1009 + self.members.index(member) * 101 + member.restarts)
            % 2**31,
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
            if member.version == self.version and not self.weights.running:
                self._set_state(member, EngineState.SERVING)
            else:
                self._set_state(
                    member, EngineState.STARTING, f"waits for the weights of version {self.version}"
                )
                self.weights.saved.offer()

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
                self._set_state(member, EngineState.SERVING)

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

    async def generate(
        self,
        *,
        session_id: str,
        prompt_ids: list[int],
        sampling: EngineSampling,
        on_engine: Callable[[str], None] | None = None,
    ) -> AsyncGenerator[Chunk]:
        """Stream one reply; the last chunk has the finish reason and the spans over all of it.

        `on_engine` gets the id of each engine that works on it. Closing the iterator drops the work.

        Raises:
            FleetUnavailable: no engine served within gateway.hold_timeout_s.
            EngineError: the engine refused the request, or the reply cannot be completed exactly.
        """
        deadline = time.monotonic() + self.config.fleet.call_timeout_s + self.config.gateway.hold_timeout_s
        tokens: list[int] = []
        spans: list[Span] = []
        for attempt in range(CONTINUATIONS + 1):
            member = await self._acquire(session_id)
            before, done = member.version, len(tokens)
            if on_engine is not None:
                on_engine(member.id)
            part = sampling if not done else _remaining(sampling, done)
            timeout_s = min(self.config.fleet.call_timeout_s, deadline - time.monotonic())
            try:
                async with aclosing(member.client.generate(prompt_ids + tokens, part, timeout_s)) as stream:
                    async for chunk in stream:
                        tokens += chunk.token_ids
                        if chunk.spans is not None:
                            shifted = [(a + done, b + done, v) for a, b, v in chunk.spans]
                            chunk = replace(chunk, spans=merge_spans(spans, shifted))
                        yield chunk
                return
            except EngineLost as e:
                member.suspect.set()
                self._affinity.pop(session_id, None)
                if attempt == CONTINUATIONS or time.monotonic() >= deadline:
                    raise
                if len(tokens) > done:
                    # The engine's own stamps were to come with the last chunk. They are known without it
                    # only when it had one version from before the request to the cut.
                    if before is None or member.version != before:
                        raise EngineError(
                            f"{member.id} was lost during a reply that lived through an update "
                            f"(version {before} to {member.version}); its tokens' versions are unknown"
                        ) from e
                    spans = merge_spans(spans, [(done, len(tokens), before)])
                if tokens and (why := _not_continuable(sampling)):
                    raise EngineError(f"{member.id} was lost after {len(tokens)} tokens; {why}") from e
                self._emit("call_moved", session_id=session_id, engine=member.id, tokens=len(tokens))
            finally:
                member.calls -= 1

    async def probe(self, prompts: list[list[int]], sampling: EngineSampling) -> list[ProbeReply]:
        """Every prompt on every serving engine; see areal_gateway.fleet.probe."""

        def left_out(member: Member, reason: str) -> None:
            self._emit("probe_left_out", engine=member.id, reason=reason)

        return await probe(self._serving(), prompts, sampling, left_out)

    async def _acquire(self, session_id: str) -> Member:
        """Wait for an engine that serves, and count the call to it."""
        timeout_s = self.config.gateway.hold_timeout_s
        if not await self._until(lambda: not self._held and self._routable(), timeout_s):
            why = self.error or "; ".join(f"{m.id} is {m.state} ({m.reason})" for m in self.members)
            raise FleetUnavailable(f"no engine served within {timeout_s:g} s: {why}")
        member = self._route(session_id)
        member.calls += 1
        return member

    def _serving(self) -> list[Member]:
        return [m for m in self.members if m.state is EngineState.SERVING]

    def _routable(self) -> list[Member]:
        """Serving engines to which no connection has failed since they last answered a probe."""
        return [m for m in self._serving() if not m.suspect.is_set()]

    def _route(self, session_id: str) -> Member:
        """The session's own engine, for its prefix cache, unless that one is full and another is not."""
        routable = self._routable()
        member = self._affinity.get(session_id)
        full = self.config.fleet.max_num_seqs
        if member in routable and (member.calls < full or all(m.calls >= full for m in routable)):
            self._affinity.move_to_end(session_id)
            return member
        member = min(routable, key=lambda m: (m.calls, m.assigned))
        member.assigned += 1
        self._affinity[session_id] = member
        self._affinity.move_to_end(session_id)
        if len(self._affinity) > SESSIONS_REMEMBERED:
            self._affinity.popitem(last=False)
        return member

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
        """{version, state, error, needs_weights, engines: [{id, url, state, version, running, pid, ...}]}.

        `needs_weights`: no engine serves and one waits for the current weights: somebody has to push them.
        """
        engines = [m.status() for m in self.members]
        waits = any(e["waits_for_weights"] for e in engines)
        return {
            "version": self.version,
            "state": self.state,
            "error": self.error,
            "needs_weights": waits and not self._serving() and not self.weights.running,
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

    def emit_weights(self, **fields: Any) -> None:
        """An event of the weight transaction."""
        self._emit("weights", **fields)

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _until(self, true: Callable[[], object], timeout_s: float) -> bool:
        """Wait until something that changed makes it true; False when time ran out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not true():
                    await self._change.wait()
        return bool(true())


def merge_spans(a: list[Span], b: list[Span]) -> list[Span]:
    """Spans of a reply's parts, one after the other; neighbours of one version become one."""
    out = list(a)
    for start, end, version in b:
        if out and out[-1][2] == version and out[-1][1] == start:
            out[-1] = (out[-1][0], end, version)
        else:
            out.append((start, end, version))
    return out


def _not_continuable(sampling: EngineSampling) -> str:
    if sampling.stop:
        return "a stop string may straddle the cut, so the reply cannot be continued exactly"
    if used := [name for name in NOT_CONTINUABLE if sampling.extra.get(name)]:
        return f"{', '.join(used)} look at the reply so far, so it cannot be continued exactly"
    return ""


def _remaining(sampling: EngineSampling, done: int) -> EngineSampling:
    """Sampling of the rest of a reply: smaller budgets, and a seed of its own.

    The same seed would draw for token `done` what it drew for token 0.
    """
    extra = dict(sampling.extra)
    if "min_tokens" in extra:
        extra["min_tokens"] = max(0, extra["min_tokens"] - done)
    seed = None if sampling.seed is None else (sampling.seed + 0x9E3779B1 * done) % 2**31
    return replace(sampling, max_tokens=sampling.max_tokens - done, seed=seed, extra=extra)
