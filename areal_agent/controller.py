"""Groups of sessions, admitted by staleness: what keeps the fleet busy while the trainer trains.

Invariant: a group that was admitted finishes, with as many sessions as it has, whatever its agents do;
groups are admitted oldest first and never dropped for being slow; a void group gives its place back.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from areal_agent.config import RunConfig
from areal_agent.dataset import Item, passes
from areal_agent.episode import Episode, EpisodeRunner, is_sealed
from areal_agent.errors import AgentError, ArealError, RewardError
from areal_agent.session import CONSTRAINED, Purpose
from areal_agent.staleness import Admission

log = logging.getLogger("areal_agent")

GREEDY = {"temperature": 0.0}

LAG_S = 2.0
"""An event loop held up this long is the agent's doing: everything else here takes milliseconds."""


@dataclass(frozen=True, slots=True)
class Group:
    """The sessions of one task that are compared with one another."""

    item: Item
    group_id: str
    episodes: tuple[Episode, ...]

    @property
    def void(self) -> bool:
        """Nothing to train on: no session has both a reward and a trainable token."""
        return not any(e.sealed.trainable for e in self.episodes)

    @property
    def rewards(self) -> list[float]:
        return [e.reward for e in self.episodes if e.reward is not None]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """A greedy pass over held-out tasks.

    Attributes:
        reward: mean over the tasks that have one; None when none has.
        tasks, missing: tasks run, and how many of them have no reward (missing is not 0).
        reward_missing_as_zero: the mean with missing ones counted as 0, for comparing across runs.
    """

    episodes: tuple[Episode, ...] = field(repr=False)
    seconds: float

    @property
    def tasks(self) -> int:
        return len(self.episodes)

    @property
    def rewards(self) -> list[float]:
        return [e.reward for e in self.episodes if e.reward is not None]

    @property
    def missing(self) -> int:
        return self.tasks - len(self.rewards)

    @property
    def reward(self) -> float | None:
        return fmean(self.rewards) if self.rewards else None

    @property
    def reward_missing_as_zero(self) -> float | None:
        return sum(self.rewards) / self.tasks if self.tasks else None

    def summary(self) -> dict[str, Any]:
        return {
            "reward": self.reward,
            "tasks": self.tasks,
            "missing": self.missing,
            "reward_missing_as_zero": self.reward_missing_as_zero,
            "seconds": round(self.seconds, 3),
        }


class Streak:
    """Failures in a row; past the bound, an error that shows the first of them."""

    def __init__(self, bound: int, what: str, error: type[ArealError], advice: str) -> None:
        self._bound, self._what, self._error, self._advice = bound, what, error, advice
        self.length = 0
        self._first: BaseException | None = None

    def note(self, failure: BaseException | None) -> None:
        if failure is None:
            self.length, self._first = 0, None
            return
        self.length += 1
        self._first = self._first or failure
        if self.length == self._bound + 1:  # once: the sessions beside it are being stopped by it
            name = type(self._first).__name__
            raise self._error(
                f"{self._what} failed in {self.length} sessions in a row, more than rollout.max_failures = "
                f"{self._bound} allows; the first time: {name}: {self._first}. {self._advice}"
            ) from self._first


class RolloutController:
    """Runs groups and evaluations of one agent against one gateway.

    Attributes:
        admission: the count of training groups.
        trained: groups finished so far that were not void.
    """

    def __init__(
        self,
        episodes: EpisodeRunner,
        config: RunConfig,
        *,
        version: int = 0,
        on_group: Callable[[Group], None] | None = None,
    ) -> None:
        """Args:
        version: where the policy stands (a resumed run starts above 0).
        on_group: told of every training group that finished, void ones included.
        """
        rollout = config.rollout
        self._episodes = episodes
        self._config = config
        self._on_group = on_group
        self._slots = asyncio.Semaphore(rollout.concurrency)
        self._eval_slots = asyncio.Semaphore(config.eval.concurrency)
        self._wake = asyncio.Event()
        self.admission = Admission(
            rollout.groups_per_step,
            rollout.max_staleness,
            version=version,
            total=config.trainer.steps * rollout.groups_per_step,
        )
        self._agent_failures = Streak(
            rollout.max_failures, "the agent", AgentError, "Its traceback is in logs/controller.log"
        )
        self._reward_failures = Streak(
            rollout.max_failures,
            "the reward function",
            RewardError,
            "Its traceback is in logs/controller.log",
        )
        self._void_sessions = 0
        self._admitted = self.admission.accepted  # groups so far, which number the seeds
        self._ran: set[int] = set()
        """Numbers of the groups that an interrupted run has finished."""

    def resume(self, states: Mapping[str, str], version: int) -> None:
        """Take over the groups of an interrupted run, which goes on from `version`; call before `train`.

        Those that finished count as before, void ones included: their tasks and seeds are used up. Those
        that were abandoned run again with the task and the seeds they had.

        Args:
            states: of every group in the ledger, by id.
        """
        finished = {g: state for g, state in states.items() if state not in ("open", "abandoned")}
        self._ran = {n for g in finished if (n := group_number(g)) is not None}
        self.admission.resume(version, sum(state != "void" for state in finished.values()))
        self._admitted = 0

    def see_version(self, version: int) -> None:
        """The policy is at `version`: may admit more."""
        if self.admission.advance(version):
            self._wake.set()

    async def train(self, items: Sequence[Item]) -> None:
        """Admit groups as long as there is room; returns when all that the run needs have finished.

        Raises what stops a run: AgentError, RewardError, GatewayError. Cancel it to stop earlier.
        """
        tasks = passes(items, self._config.rollout.seed)
        watch = asyncio.create_task(watch_event_loop())
        try:
            async with asyncio.TaskGroup() as groups:
                await self._admit(groups, tasks)
        except BaseExceptionGroup as errors:
            raise unwrap(errors) from unwrap(errors).__cause__
        finally:
            watch.cancel()

    async def _admit(self, groups: asyncio.TaskGroup, tasks: Iterator[Item]) -> None:
        admission = self.admission
        while admission.accepted < (admission.total or 0):
            self._wake.clear()
            for _ in range(admission.room):
                admission.admit()
                while self._admitted in self._ran:
                    next(tasks)
                    self._admitted += 1
                groups.create_task(self._train_group(next(tasks), self._admitted))
                self._admitted += 1
            await self._wake.wait()

    async def _train_group(self, item: Item, number: int) -> None:
        group = await self.run_group(item, "train", self._config.rollout.group_size, number)
        self.admission.finish(accepted=not group.void)
        self._note_void(group)
        if self._on_group is not None:
            self._on_group(group)
        self._wake.set()

    async def run_group(self, item: Item, purpose: Purpose, size: int, number: int = 0) -> Group:
        """`size` sessions of one task, side by side. `number`: which group of the run, for its seeds."""
        group_id = f"{number}-{uuid.uuid4().hex}"
        runs = [
            self._one(
                item,
                self._slots,
                purpose=purpose,
                group_id=group_id,
                group_size=size,
                sampling=self._seeded(number, member),
            )
            for member in range(size)
        ]
        return Group(item, group_id, tuple(await gather(runs)))

    def _seeded(self, number: int, member: int) -> dict[str, int] | None:
        seed = self._config.sampling.seed
        return None if seed is None else {"seed": session_seed(seed, number, member)}

    async def evaluate(self, items: Sequence[Item]) -> EvalResult:
        """Each task once, greedily; every sampled token is recorded and none is trained."""
        start = time.monotonic()
        runs = [self._one(i, self._eval_slots, purpose="eval", sampling=GREEDY) for i in items]
        return EvalResult(tuple(await gather(runs)), time.monotonic() - start)

    async def _one(self, item: Item, slots: asyncio.Semaphore, **options: Any) -> Episode:
        episode = await self._episodes.run(item, slots, **options)
        self._agent_failures.note(episode.agent_error)
        if episode.agent_error is None and not is_sealed(episode.reward_error):
            self._reward_failures.note(episode.reward_error)  # one that came late did not fail
        return episode

    def _note_void(self, group: Group) -> None:
        """A run whose groups are all void would go on for ever without a step."""
        if not group.void:
            self._void_sessions = 0
            return
        self._void_sessions += len(group.episodes)
        bound = max(self._config.rollout.max_failures, 4 * self._config.rollout.group_size)
        if self._void_sessions > bound:
            if self._episodes.silence and all(e.sealed.calls_total == 0 for e in group.episodes):
                raise AgentError(self._episodes.silence)
            if all(e.sealed.all_constrained for e in group.episodes):
                raise AgentError(
                    f"{self._void_sessions} sessions in a row gave nothing to train on: {CONSTRAINED}"
                )
            unrewarded = sum(e.reward is None for e in group.episodes)
            raise AgentError(
                f"{self._void_sessions} sessions in a row gave nothing to train on; of the last "
                f"{len(group.episodes)}, {unrewarded} have no reward and "
                f"{sum(e.sealed.trained_tokens == 0 for e in group.episodes)} no trainable call "
                f"(calls of the last one: {dict(group.episodes[-1].sealed.calls)})"
            )


def group_number(group_id: str) -> int | None:
    """Which group of the run it is; None where somebody else named it."""
    head = group_id.partition("-")[0]
    return int(head) if head.isdecimal() else None


def session_seed(seed: int, group: int, member: int) -> int:
    """A seed per session: with the run's own, all sessions of a group would say the same."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {group} {member}".encode(), digest_size=4).digest(), "big")


def unwrap(errors: BaseExceptionGroup[Any]) -> BaseException:
    """The first leaf of an exception group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def gather(runs: Sequence[Any]) -> list[Any]:
    """Like asyncio.gather, but the first failure cancels the others and waits for their end."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run) for run in runs]
    except BaseExceptionGroup as errors:
        raise unwrap(errors) from unwrap(errors).__cause__
    return [task.result() for task in tasks]


async def watch_event_loop() -> None:
    """Says once when something holds the loop up: an async agent that blocks stops every other session."""
    while True:
        start = time.monotonic()
        await asyncio.sleep(0.1)
        lag = time.monotonic() - start - 0.1
        if lag > LAG_S:
            log.warning(
                "something blocked the event loop for %.1f s, and every session with it; an agent or reward "
                "function that blocks (time.sleep, a synchronous client) must be a plain `def`, not `async def`",
                lag,
            )
            return
