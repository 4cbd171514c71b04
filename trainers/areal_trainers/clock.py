"""Where a step's seconds go: every second in exactly one phase. What no phase claimed is `idle`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES: tuple[str, ...] = (
    "lease",
    "proximal",
    "reference",
    "values",
    "forward",
    "backward",
    "step",
    "critic",
    "gather",
    "broadcast",
    "probe",
    "idle",
)


class Clock:
    """`with clock("lease"): ...`; `lap()` returns the seconds of each phase since the last lap.

    A phase inside another (gather in broadcast) takes its seconds out of the outer one. `synchronize` is
    called at a phase's end, or an accelerator's work would be booked to the next one.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self._synchronize = synchronize
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._open = ["idle"]
        self._since = time.monotonic()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if phase not in PHASES:
            raise ValueError(f"no phase is called {phase!r}; there are {', '.join(PHASES)}")
        self._book()
        self._open.append(phase)
        try:
            yield
            self._synchronize()
        finally:
            self._book()
            self._open.pop()

    def lap(self) -> dict[str, float]:
        self._book()
        spent, self._spent = self._spent, dict.fromkeys(PHASES, 0.0)
        return spent

    def _book(self) -> None:
        """Give the seconds since the last call to the innermost phase that is open."""
        now = time.monotonic()
        self._spent[self._open[-1]] += now - self._since
        self._since = now
