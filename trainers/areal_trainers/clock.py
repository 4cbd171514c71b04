"""Where a step's seconds go. What no phase claimed is `idle`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = (
    "lease",
    "proximal",
    "reference",
    "values",
    "forward_backward",
    "step",
    "critic",
    "broadcast",
    "probe",
    "idle",
)


class Clock:
    """`with clock("lease"): ...`; `lap()` returns the seconds of each phase since the last lap.

    `synchronize` is called at a phase's end, or an accelerator's work would be booked to the next one.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self._synchronize = synchronize
        self._spent: dict[str, float] = {}
        self._start = time.monotonic()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
            self._synchronize()
        finally:
            self._spent[phase] = self._spent.get(phase, 0.0) + time.monotonic() - begin

    def lap(self) -> dict[str, float]:
        now = time.monotonic()
        spent = {p: self._spent.get(p, 0.0) for p in PHASES[:-1]}
        spent["idle"] = max(0.0, now - self._start - sum(spent.values()))
        self._spent, self._start = {}, now
        return spent
