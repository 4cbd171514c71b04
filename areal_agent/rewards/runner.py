"""Running the user's reward function safely.

Invariant: missing is not 0. A verifier that raised or ran out of time (counted from its own start)
gives `missing`, and it is counted; a value that is no number is the user's mistake, not a reward, and
stops the run with a sentence.
"""

from __future__ import annotations

import asyncio
import logging
import math
import numbers
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from areal_agent.errors import RewardError
from areal_agent.userland import TimedOut, TooManyAbandoned, Userland

log = logging.getLogger("areal_agent")

THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Sync reward functions running at once; more would only share the interpreter in smaller slices."""


@dataclass(frozen=True, slots=True)
class Reward:
    """What one run of the reward function came to.

    Attributes:
        value: the number, or None when missing.
        error: why it is missing when the function failed; None when it chose to return None.
    """

    value: float | None
    error: BaseException | None = None


class RewardRunner:
    """Runs one reward function for many sessions at once.

    Attributes:
        counts: how many were `set`, `none` (returned None), `failed` (raised) and `timeout`.
    """

    OFFERS = ("session", "trajectory")

    def __init__(self, fn: Callable[..., Any], timeout_s: float) -> None:
        """Raises ConfigError when `fn` cannot be called as reward(task, result)."""
        self._user = Userland(fn, "reward", ("task", "result"), self.OFFERS)
        self._timeout_s = timeout_s
        self._threads = asyncio.Semaphore(THREADS)
        self.counts: Counter[str] = Counter()

    @property
    def wants_trajectory(self) -> bool:
        return "trajectory" in self._user.extras

    def longest_s(self, sessions: int) -> float:
        """How long the last of so many rewards, asked for at once, may take from now, its wait included."""
        rounds = 1 if self._user.is_async else math.ceil(sessions / THREADS)
        return max(1, rounds) * self._timeout_s

    async def run(self, task: Mapping[str, Any], result: Any, extras: Mapping[str, Any]) -> Reward:
        """Raises RewardError when the function returned something that is neither a number nor None."""
        try:
            if self._user.is_async:
                value = await self._user.call(task, result, timeout=self._timeout_s, extras=extras)
            else:
                async with self._threads:
                    value = await self._user.call(task, result, timeout=self._timeout_s, extras=extras)
        except TooManyAbandoned:
            raise
        except TimedOut as e:
            return self._missing("timeout", e, task)
        except Exception as e:
            return self._missing("failed", e, task)
        number = as_reward(value, task)
        self.counts["none" if number is None else "set"] += 1
        return Reward(number)

    def _missing(self, kind: str, error: Exception, task: Mapping[str, Any]) -> Reward:
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            log.warning(
                "the reward function %s on task %s; its reward is missing (not 0). Further ones are counted only.",
                "ran out of time" if kind == "timeout" else "raised",
                shorten(task),
                exc_info=None if kind == "timeout" else error,
            )
        return Reward(None, error)


def as_reward(value: Any, task: Mapping[str, Any]) -> float | None:
    """float, int, bool (and numpy's) or None, as the ledger takes it. Raises RewardError."""
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and type(value).__name__ not in ("bool_", "bool"):
        raise RewardError(
            f"the reward function returned {shorten(value)} (a {type(value).__name__}) for task {shorten(task)}; "
            "it must return a number, or None when there is no reward"
        )
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(
            f"the reward function returned {number} for task {shorten(task)}; "
            "it must return a finite number, or None when there is no reward"
        )
    return number


def shorten(value: Any, most: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= most else text[: most - 1] + "…"
