"""Replies of very different lengths, and what waiting for the longest of them costs: computed, not measured.

Invariant: a seed gives the lengths, and lengths and step times give every figure; nothing here looks at a clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

SIGMA = 1.2
"""Of the lengths' logarithms."""

LONGEST = 20
"""Mean replies."""

ROUNDING = 1e-9
"""What floating point leaves of a reply that ended, or of a time that is over."""

StepTime = Callable[[int], float]
"""Seconds of one decoding step, by the replies that an engine decodes at once."""


def lengths(mean: int, seed: object) -> Iterator[int]:
    """Tokens of one reply after the other: log-normal with that mean, cut at LONGEST means."""
    rng = random.Random(str(seed))
    middle = math.log(mean) - SIGMA**2 / 2
    while True:
        yield max(1, min(LONGEST * mean, round(rng.lognormvariate(middle, SIGMA))))


def constant(_: int) -> float:
    """The step time of an ideal accelerator: decoding reads the weights, however many replies there are."""
    return 1.0


@dataclass(frozen=True)
class Measured:
    """Step times between measured `points` (replies at once, seconds), which ascend; straight lines between."""

    points: Sequence[tuple[int, float]]

    def __call__(self, replies: int) -> float:
        for (a, slow), (b, slower) in pairwise(self.points):
            if replies <= b:
                return slow + (slower - slow) * max(0, replies - a) / (b - a)
        return self.points[-1][1]


class Engine:
    """Slots that decode one reply after the other each, a token a step.

    `left` [slots]: tokens still to come of the reply in each slot; 0 where it is empty. `idle_s`: seconds that
    slots stood empty, summed over them.
    """

    def __init__(self, replies: Sequence[Iterator[int]], step: StepTime) -> None:
        self._replies, self._step = replies, step
        self.left: list[float] = [0.0] * len(replies)
        self.idle_s = 0.0

    def run(self, seconds: float, *, admit: bool) -> tuple[float, float]:
        """(tokens, seconds used): less than `seconds` only where nothing is admitted and all replies ended."""
        tokens = used = 0.0
        while seconds - used > ROUNDING:
            if admit:
                self.left = [n or next(r) for n, r in zip(self.left, self._replies, strict=True)]
            busy = [n for n in self.left if n]
            if not busy:
                break
            step = self._step(len(busy))
            steps = min(*busy, (seconds - used) / step)
            tokens, used = tokens + steps * len(busy), used + steps * step
            self.idle_s += steps * step * (len(self.left) - len(busy))
            self.left = [n - steps if n - steps > ROUNDING else 0.0 for n in self.left]
        return tokens, used


@dataclass(frozen=True)
class Computed:
    """A window: from the moment an update is there until the next may be, which is the interval, or the drain where
    that took longer. `drained_s`: seconds until the longest reply ended. `idle_s`: of empty slots in them, summed.
    """

    tokens: float
    seconds: float
    drained_s: float = 0.0
    idle_s: float = 0.0


def visit(
    replies: Sequence[Iterator[int]],
    engines: int,
    step: StepTime,
    *,
    settle_s: float,
    interval_s: float,
    windows: int,
    drain: bool,
) -> list[Computed]:
    """The windows of one closed loop, a slot for each of `replies`, with updates that take no time themselves."""
    fleet = [Engine(replies[i::engines], step) for i in range(engines)]
    for engine in fleet:
        engine.run(settle_s, admit=True)
    out = []
    for _ in range(windows):
        tokens = drained_s = idle_s = 0.0
        if drain:
            before = sum(engine.idle_s for engine in fleet)
            waits = [engine.run(math.inf, admit=False) for engine in fleet]
            tokens, drained_s = sum(n for n, _ in waits), max(s for _, s in waits)
            idle_s = sum(engine.idle_s for engine in fleet) - before
            idle_s += sum(
                (drained_s - s) * len(engine.left) for engine, (_, s) in zip(fleet, waits, strict=True)
            )
        seconds = max(interval_s, drained_s)
        tokens += sum(engine.run(seconds - drained_s, admit=True)[0] for engine in fleet)
        out.append(Computed(tokens, seconds, drained_s, idle_s))
    return out
