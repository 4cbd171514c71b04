"""One session from opening to seal: the agent, its deadline, its reward.

Invariant: a session that was opened is sealed, whatever the agent, the reward function or a
cancellation does; where the agent failed the reward function is not asked, so that such a session has
no reward unless the agent recorded one itself before it failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from areal_agent.agents import AgentRunner
from areal_agent.dataset import Item
from areal_agent.errors import ArealError, GatewayError
from areal_agent.observe import Binding
from areal_agent.rewards.runner import RewardRunner, shorten
from areal_agent.session import GatewayClient, Outcome, Purpose, Sealed, Session
from areal_agent.userland import TimedOut, TooManyAbandoned

log = logging.getLogger("areal_agent")

SEAL_SLACK_S = 60.0
"""What the gateway's own deadline leaves on top of ours: it is there for a controller that died."""

CANCELLED_SEAL_S = 5.0
"""How long a cancelled session may take to tell the gateway so."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What one session came to.

    Attributes:
        reward: as the ledger has it; None when missing.
        agent_error: what the agent raised (or TimedOut), if anything.
        reward_error: likewise of the reward function; a GatewayError where its value came too late.
        seconds: from opening to seal.
    """

    item: Item
    session_id: str
    outcome: Outcome
    sealed: Sealed
    seconds: float
    agent_error: BaseException | None = None
    reward_error: BaseException | None = None

    @property
    def reward(self) -> float | None:
        return self.sealed.reward if self.sealed.reward_state == "set" else None


class EpisodeRunner:
    """Runs sessions of one agent and one reward function.

    Attributes:
        outcomes: sessions by how they ended.
        silent: sessions that ended well without a single call reaching the gateway.
        late: rewards that came after the gateway had sealed the session; missing, as its ledger has it.
    """

    def __init__(
        self,
        gateway: GatewayClient,
        agent: AgentRunner,
        reward: RewardRunner | None,
        *,
        session_timeout_s: float,
        reward_timeout_s: float,
        concurrency: int = 1,
    ) -> None:
        """Args:
        reward: None when rewards come from the agent itself, as its result or over HTTP.
        concurrency: most sessions at once, over all the semaphores `run` is given.
        """
        self.gateway = gateway
        self._agent = agent
        self._reward = reward
        self._timeout_s = session_timeout_s
        waits = 0.0 if reward is None else reward.longest_s(concurrency)
        self._deadline_s = session_timeout_s + max(waits, reward_timeout_s) + SEAL_SLACK_S
        self.outcomes: Counter[str] = Counter()
        self.silent = 0
        self.silence = ""
        self.late = 0
        self._told: set[str] = set()

    async def run(
        self,
        item: Item,
        slots: asyncio.Semaphore,
        *,
        purpose: Purpose,
        group_id: str | None = None,
        group_size: int = 1,
        sampling: Mapping[str, Any] | None = None,
    ) -> Episode:
        """Open, run, reward, seal. `slots` bounds the sessions open at once, first come first served.

        A place is held until the reward is there: sessions that wait for theirs are then no more than
        `concurrency`, and the gateway's deadline can cover that wait.

        Raises:
            GatewayError: the gateway failed us (not the agent).
            RewardError: the reward function returned what is no reward.
        """
        async with slots:
            start = time.monotonic()
            session = await _opened(
                self.gateway.open_session(
                    item.task_id,
                    purpose=purpose,
                    group_id=group_id,
                    group_size=group_size,
                    sampling=sampling,
                    deadline_s=self._deadline_s,
                )
            )
            try:
                result, binding, error = await self._run_agent(item, session)
                outcome: Outcome = (
                    "finished" if error is None else "timeout" if isinstance(error, TimedOut) else "failed"
                )
                reward_error: BaseException | None = None
                if error is None and self._reward is not None:
                    reward_error = await self._run_reward(item, session, result)
                    if is_sealed(reward_error):
                        outcome = "timeout"  # by the gateway's own deadline
                sealed = await session.seal(outcome, None if error is None else _describe(error))
            except BaseException:
                await _seal_quietly(session, "the run was stopped")
                raise
        self.outcomes[outcome] += 1
        if error is None and sealed.calls_total == 0:
            self._explain_silence(binding)
        return Episode(item, session.id, outcome, sealed, time.monotonic() - start, error, reward_error)

    async def _run_agent(
        self, item: Item, session: Session
    ) -> tuple[Any, Binding | None, BaseException | None]:
        try:
            result, binding = await self._agent.run(item.task, session, self._timeout_s)
            return result, binding, None
        except TooManyAbandoned:
            raise
        except (Exception, SystemExit) as e:  # sys.exit() in an agent ends its session, not the run
            kind = "timeout" if isinstance(e, TimedOut) else "failed"
            if kind not in self._told:
                self._told.add(kind)
                log.warning(
                    "the agent %s on task %s; the session counts as %s. Further ones are counted only.",
                    f"did not finish: {e}" if kind == "timeout" else "raised",
                    shorten(item.task),
                    kind,
                    exc_info=None if kind == "timeout" else e,
                )
            return None, None, e

    async def _run_reward(self, item: Item, session: Session, result: Any) -> BaseException | None:
        assert self._reward is not None
        extras: dict[str, Any] = {"session": session}
        if self._reward.wants_trajectory:
            extras["trajectory"] = await session.inspect(trajectory=True)
        reward = await self._reward.run(item.task, result, extras)
        if reward.value is not None:  # None is not sent: it would overwrite what the agent itself recorded
            try:
                await session.reward(reward.value, key="areal-reward-function")
            except GatewayError as e:
                if not is_sealed(e):
                    raise
                self.late += 1
                if self.late == 1:
                    log.warning(
                        "the reward of task %s came after the gateway's deadline of %g s had sealed its session; "
                        "it is missing (not 0). Further ones are counted only.",
                        shorten(item.task),
                        self._deadline_s,
                    )
                return e
        return reward.error

    def _explain_silence(self, binding: Binding | None) -> None:
        self.silent += 1
        if self.silent == 1:
            self.silence = silence(binding)
            log.warning("%s", self.silence)


def silence(binding: Binding | None) -> str:
    """Why a session may have ended without a single call at the gateway."""
    text = (
        "the agent finished a session without a single call reaching the gateway, so nothing can be trained"
    )
    if binding is not None and binding.strays:
        hosts = ", ".join(sorted(binding.strays)[:3])
        return (
            f"{text}: it called {hosts}, which nobody named as a model host; set OPENAI_BASE_URL to it, "
            "call areal_agent.observe(hosts=[...]), or let the agent take base_url= and api_key="
        )
    if binding is not None and binding.captured:
        return f"{text}: {binding.captured} requests were sent to it and none became a call; see logs/gateway.log"
    return (
        f"{text}. Likely causes: its client is built on neither httpx nor httpx2 (let the agent take base_url= "
        "and api_key= by name); it calls from threads or processes of its own (start them with "
        "contextvars.copy_context().run, or hand them base_url and api_key); it caches its replies; "
        "or it did not call a model at all"
    )


async def _opened(opening: Coroutine[Any, Any, Session]) -> Session:
    """The session; a cancellation meanwhile waits for it and seals it, else nobody would."""
    task = asyncio.ensure_future(opening)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await _outlast(task)
        if task.done() and not task.cancelled() and task.exception() is None:
            await _seal_quietly(task.result(), "the run was stopped")
        task.cancel()
        raise


async def _seal_quietly(session: Session, reason: str) -> None:
    """Best effort on the way out: the gateway's own deadline seals what this cannot reach."""
    task = asyncio.ensure_future(session.seal("failed", reason))
    await _outlast(task)
    if not task.done():
        task.cancel()
    elif not task.cancelled() and isinstance(task.exception(), GatewayError):
        log.info("session %s was left to the gateway's deadline: %s", session.id, task.exception())


async def _outlast(task: asyncio.Future[Any]) -> None:
    """Wait for `task` at most CANCELLED_SEAL_S, through further cancellations (nested groups send several)."""
    end = time.monotonic() + CANCELLED_SEAL_S
    while not task.done() and time.monotonic() < end:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task}, timeout=end - time.monotonic())


def is_sealed(error: BaseException | None) -> bool:
    """Whether the gateway refused because the session is over: a fact of that session, not a failure."""
    return isinstance(error, GatewayError) and error.code in ("session_sealed", "session_deadline")


def _describe(error: BaseException) -> str:
    if isinstance(error, (ArealError, TimedOut)):
        return str(error)
    return "".join(traceback.format_exception_only(error)).strip()[:2000]
