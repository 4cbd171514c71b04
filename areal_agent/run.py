"""One run from its folder to its summary: what train.py's story calls step by step.

Invariant: leaving the context, in whatever way, ends every process of the run and restores what was
changed in this one (environment, HTTP clients, logging).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

from areal_agent import online, panel
from areal_agent.agents import AgentRunner
from areal_agent.config import RunConfig
from areal_agent.controller import EvalResult, Group, RolloutController, gather, unwrap
from areal_agent.dataset import Item
from areal_agent.episode import EpisodeRunner
from areal_agent.launch.services import Services
from areal_agent.observe import client_environment, observe, release_connections, unobserve
from areal_agent.rewards.runner import RewardRunner
from areal_agent.rundir import RunDir
from areal_agent.runlog import RunLog
from areal_agent.session import CONSTRAINED, GatewayClient

log = logging.getLogger("areal_agent")

POLL_S = 0.2
"""Between looks at the fleet's version: what η = 0 loses per step, against 5 small requests a second."""

RATE_WINDOW_S = 5.0

EVAL_BEFORE = "eval_before.json"
"""In the run folder: the summary of the evaluation before training, which a resumed run cannot repeat."""


class Run:
    """An async context manager around the processes of one run.

    Attributes:
        folder: the run folder.
        config: with everything resolved.
    """

    def __init__(
        self,
        config: RunConfig,
        agent: Any,
        reward: Callable[..., Any] | None,
        *,
        folder: RunDir | None = None,
        services: Callable[[RunDir, RunConfig], Services] | None = None,
    ) -> None:
        """Args:
            agent: None for an online run that evaluates nothing.

        Raises ConfigError when the agent or the reward cannot be called as they must, or no folder made.
        """
        self._agent = None if agent is None else AgentRunner(agent)
        self._reward = None if reward is None else RewardRunner(reward, config.rollout.reward_timeout_s)
        self.folder = folder or RunDir.create(config)
        self.config = config.model_copy(update={"run_dir": str(self.folder.path)})
        self._services = (services or Services)(self.folder, self.config)
        self._progress = panel.Progress(
            name=str(self.folder.path.name),
            steps=config.trainer.steps,
            max_staleness=config.rollout.max_staleness,
        )
        self._view = panel.view(self._progress)
        self._stack = contextlib.AsyncExitStack()
        self._seconds: dict[str, float] = {}
        self._recent: deque[Group] = deque(
            maxlen=config.rollout.groups_per_step
        )  # what a step's reward means
        self._fresh: list[Group] = []  # finished since the last step was reported
        self._status: dict[str, Any] = {}
        self._rates: list[tuple[float, int]] = []
        self._finished: Counter[str] = Counter(trained=0, void=0)
        self._online = config.online.enabled
        self._say_next = 0.0
        self._constrained = False

    async def __aenter__(self) -> Run:
        stack = self._stack
        try:
            stack.enter_context(self.folder.held())
            stack.enter_context(self._view)
            self._log = stack.enter_context(RunLog(self.folder, self._view.note))
            if observe():
                stack.callback(unobserve)
            stack.push_async_callback(self._services.stop)
            with self.phase("starting the gateway and its engines"):
                self._gateway = await self._services.start_gateway()
                stack.push_async_callback(self._gateway.aclose)
                await self._services.watch(self._services.engines_ready(self._gateway))
            stack.enter_context(client_environment(self._gateway.url))
            if self._agent is not None:
                self._prepare_sessions(self._agent)
            if self._online:
                self.remark(online.invitation(self._gateway.url, self.folder.path / "project.key"))
            await self._look()
        except BaseException:
            await stack.aclose()
            raise
        return self

    def _prepare_sessions(self, agent: AgentRunner) -> None:
        rollout = self.config.rollout
        self._episodes = EpisodeRunner(
            self._gateway,
            agent,
            self._reward,
            session_timeout_s=rollout.session_timeout_s,
            reward_timeout_s=rollout.reward_timeout_s,
            concurrency=rollout.concurrency + self.config.eval.concurrency,
        )
        self._controller = RolloutController(self._episodes, self.config, on_group=self._note_group)

    async def __aexit__(self, *_: object) -> None:
        self._progress.phase = "stopping"
        await self._stack.aclose()
        await release_connections()
        # SDK clients that agents left open close themselves when collected, which needs this very loop.
        gc.collect()
        await asyncio.sleep(0)

    @property
    def gateway(self) -> GatewayClient:
        return self._gateway

    def remark(self, remarks: Iterable[str]) -> None:
        """Show what the user should know, and keep it in the log."""
        for text in remarks:
            log.warning("%s", text)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what the run does now; its seconds go into the summary."""
        start = time.monotonic()
        self._progress.phase = name
        self._view.phase()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    async def evaluate(self, items: Sequence[Item], when: str) -> EvalResult | None:
        """Greedy, each task once; None without held-out tasks."""
        if not items:
            return None
        with self.phase(f"evaluating {when}"):
            result = await self._services.watch(self._with_status(self._evaluate(items, when)))
        return result

    async def evaluate_start(self, items: Sequence[Item]) -> dict[str, Any] | None:
        """How the model scores that training starts from; a resumed run keeps what was found before.

        None without held-out tasks, and where the model is no longer served to be asked.
        """
        known = self.folder.read(EVAL_BEFORE)
        if (
            known is None
            and self._progress.step == 0
            and (result := await self.evaluate(items, "before training"))
        ):
            known = result.summary()
            self.folder.write(EVAL_BEFORE, known)
        return known

    async def start_trainer(self) -> None:
        with self.phase("starting the trainer"):
            await self._services.start_trainer(self._gateway)

    async def resume_trainer(self) -> None:
        """Go on where an interrupted run was: returns once the engines hold its newest training state."""
        version = self.folder.resumable_version()
        with self.phase("resuming the trainer"):
            states = await self._gateway.take_over(version, abandon=not self._online)
            if not self._online:
                self._controller.resume(states, version)
            await self._services.start_trainer(self._gateway, resume=True)
            await self._services.watch(self._until(version))
        # What was logged of this step stands; `_look` would log it again as one just finished.
        self._progress.step = version
        log.warning("resumed at version %d with %d groups in the ledger", version, len(states))

    async def _until(self, version: int) -> None:
        """The trainer pushed `version`: sessions opened before would be answered by other weights."""
        ended = asyncio.ensure_future(self._services.trainer_finished())
        try:
            while not ended.done():
                if int((await self._gateway.status()).get("version") or 0) == version:
                    break
                await asyncio.sleep(POLL_S)
            else:
                ended.result()  # raises what the trainer said
        finally:
            ended.cancel()

    async def train(self, training: Sequence[Item], held_out: Sequence[Item]) -> dict[str, Any]:
        """Rollouts (online: the service's) until the trainer ends; returns the trainer's own summary."""
        self._progress.training_since = time.monotonic()
        with self.phase("training"):
            return await self._services.watch(self._train(training, held_out))

    async def rollout(self, items: Sequence[Item], group_size: int) -> list[Group]:
        """Each task once, `group_size` sessions each, sampled as in training; nothing is trained."""
        with self.phase("rolling out"):
            groups = [
                self._controller.run_group(item, "rollout", group_size, n) for n, item in enumerate(items)
            ]
            return await self._services.watch(self._with_status(gather(groups)))

    async def summarise(
        self, before: dict[str, Any] | None, after: EvalResult | None, trainer: dict[str, Any]
    ) -> dict[str, Any]:
        """Fold everything into summary.json; returns it."""
        status = await self._gateway.status()
        calls = status.get("calls") or {}
        summary = {
            "reward_before": before["reward"] if before else None,
            "reward_after": after.reward if after else None,
            "steps": trainer.get("steps"),
            "final_version": status.get("version"),
            "tokens_trained": trainer.get("tokens_trained"),
            "wall_s": round(self._progress.elapsed_s, 3),
            "staleness_max": trainer.get("staleness_max"),
            "logprob_gap_max": trainer.get("logprob_gap_max"),
            "logprob_gap_tokens": trainer.get("logprob_gap_tokens"),
            "multi_version_calls": status.get("multi_version_calls"),
            "calls_total": calls.get("total"),
            "calls_incomplete": calls.get("incomplete"),
            "calls_constrained": calls.get("constrained"),
            "checkpoint": trainer.get("checkpoint"),
            "eval_before": before,
            "eval_after": after.summary() if after else None,
            "calls": calls,
            "tokens_sampled": status.get("tokens_sampled"),
            "rewards": dict(self._reward.counts) if self._reward else {},
            **self._counted_sessions(status),
            "engines": engines_by_state(status),
            "seconds": {name: round(s, 3) for name, s in self._seconds.items()},
            "run_dir": str(self.folder.path),
        }
        self.folder.write("summary.json", summary)
        return summary

    def _counted_sessions(self, status: dict[str, Any]) -> dict[str, Any]:
        if self._online:
            steps = self._progress.rewards
            return {
                "sessions": status.get("sessions") or {},
                "groups": status.get("groups") or {},
                "reward_first_step": steps[0] if steps else None,
                "reward_last_step": steps[-1] if steps else None,
            }
        return {
            "sessions": dict(self._episodes.outcomes),
            "sessions_without_calls": self._episodes.silent,
            "rewards_late": self._episodes.late,
            "groups": dict(self._finished),
        }

    async def _train(self, training: Sequence[Item], held_out: Sequence[Item]) -> dict[str, Any]:
        try:
            async with asyncio.TaskGroup() as group:
                work = [group.create_task(self._follow(held_out))]
                if not self._online:
                    work.append(group.create_task(self._controller.train(training)))
                with online.ctrl_c(self._stop) if self._online else contextlib.nullcontext():
                    finished = await self._services.trainer_finished()
                for task in work:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise unwrap(errors) from unwrap(errors).__cause__
        await self._look()
        return finished

    def _stop(self) -> None:
        """In a signal's handler: it may not print."""
        self.folder.stop_path.touch()

    async def _evaluate(self, items: Sequence[Item], when: str) -> EvalResult:
        step = self._progress.step
        result = await self._controller.evaluate(items)
        self._log.evaluation(when, step, result.episodes)
        self._progress.eval_missing = (result.missing, result.tasks)
        if result.reward is not None:
            self._progress.evals.append((step, result.reward))
            self._log.step(step, {"eval_reward": result.reward, "eval_missing": result.missing})
        if result.missing:
            self._view.note(
                f"{result.missing} of {result.tasks} held-out tasks have no reward (missing is not 0)"
            )
        return result

    async def _follow(self, held_out: Sequence[Item]) -> None:
        """While training: versions to the controller, numbers to the log, an evaluation now and then."""
        every, seen = self.config.eval.every, 0
        async with asyncio.TaskGroup() as evaluations:
            running: asyncio.Task[Any] | None = None
            while True:
                await self._look()
                if self._online:
                    self._say_waiting()
                step = self._progress.step
                due = every and step // every > seen // every and step < self._progress.steps
                if due and held_out and (running is None or running.done()):
                    chosen = held_out[: self.config.eval.tasks_during]
                    running = evaluations.create_task(self._evaluate(chosen, "during training"))
                seen = step
                await asyncio.sleep(POLL_S)

    async def _with_status(self, work: Any) -> Any:
        """Run `work` while the panel is kept up to date."""

        async def poll() -> None:
            while True:
                await asyncio.sleep(1.0)
                await self._look()

        poller = asyncio.ensure_future(poll())
        try:
            return await work
        finally:
            poller.cancel()
            await asyncio.wait({poller})

    async def _look(self) -> None:
        """Fetch the status; a new version is a finished step."""
        status = self._status = await self._gateway.status()
        p = self._progress
        p.engines = engines_by_state(status)
        p.calls = status.get("calls") or {}
        p.weights_state = str(status.get("weights_state") or "")
        p.trainer = status.get("trainer") or {}
        p.tokens = int(status.get("tokens_sampled") or 0)
        now = time.monotonic()
        self._rates = [r for r in self._rates if r[0] > now - RATE_WINDOW_S] + [(now, p.tokens)]
        first, tokens = self._rates[0]
        p.tokens_per_s = (p.tokens - tokens) / (now - first) if now > first else 0.0
        if isinstance(p.trainer.get("staleness"), (int, float)):
            p.staleness = int(p.trainer["staleness"])
        # Online a step is told when its numbers are there, a moment after its version: there are no others.
        source = p.trainer.get("step") if self._online else status.get("version")
        if (step := int(source or 0)) > p.step:
            p.step = step
            self._finish_step(step)
            if not self._online:
                self._controller.see_version(step)

    def _say_waiting(self) -> None:
        """Online: into the panel at every look, into a log now and then."""
        p, now = self._progress, time.monotonic()
        stopping = self.folder.stop_path.exists()
        fresh = (
            "stopping after the batch it is at"
            if stopping
            else online.waiting_for(self._status, self.config.rollout.groups_per_step)
        )
        news, p.phase = stopping and p.phase != fresh, fresh
        if news or now >= self._say_next:
            self._say_next = now + online.SAY_S
            self._view.phase()

    def _note_group(self, group: Group) -> None:
        if not self._constrained and all(e.sealed.all_constrained for e in group.episodes):
            self._constrained = True
            self.remark([CONSTRAINED])
        self._finished["void" if group.void else "trained"] += 1
        self._recent.append(group)
        self._fresh.append(group)

    def _finish_step(self, step: int) -> None:
        if self._online:
            if isinstance(reward := self._progress.trainer.get("reward_mean"), (int, float)):
                self._progress.rewards.append(float(reward))
            self._log.step(step, {"tokens_per_s": self._progress.tokens_per_s})
            self._view.step()
            return
        groups, self._fresh = self._fresh, []
        rewards = [r for g in self._recent for r in g.rewards]
        episodes = [e for g in groups for e in g.episodes]
        if rewards:
            self._progress.rewards.append(fmean(rewards))
        admission = self._controller.admission
        self._log.step(
            step,
            {
                "reward": fmean(rewards) if rewards else None,
                "groups": len(groups),
                "groups_void": sum(g.void for g in groups),
                "rewards_missing": sum(e.reward is None for e in episodes),
                "sessions_failed": sum(e.outcome != "finished" for e in episodes),
                "session_seconds": fmean(e.seconds for e in episodes) if episodes else None,
                "running": admission.running,
                "accepted": admission.accepted,
                "tokens_per_s": self._progress.tokens_per_s,
            },
        )
        self._view.step()


def engines_by_state(status: dict[str, Any]) -> dict[str, int]:
    engines = (status.get("fleet") or {}).get("engines") or []
    return dict(Counter(str(e.get("state")) for e in engines))
