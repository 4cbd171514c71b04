"""What a run writes down while it goes: metrics.jsonl, evals.jsonl, TensorBoard events, its own log file.

Invariant: a line is appended by one write to a file opened for appending, so lines of the trainer and of
the controller never mix.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areal_agent.rundir import RunDir

log = logging.getLogger("areal_agent")


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """One JSON object as one line; numbers that JSON lacks (NaN, inf) become null."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in value.items()}
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, (json.dumps(clean, allow_nan=False, default=str) + "\n").encode())
    finally:
        os.close(fd)


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps after `step` from a file of `append_line`: a resumed run makes those steps again.

    Nobody may append meanwhile. A line that is not JSON, cut off as its writer was killed, goes too.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("".join(kept))
    temporary.replace(path)


class RunLog:
    """The controller's part of the run folder's records. Close it, or use it as a context manager."""

    SOURCE = "controller"

    def __init__(self, run: RunDir, notify: Callable[[str], None] = lambda _: None) -> None:
        """Args: notify: shows a warning to the user at once; everything also goes to controller.log."""
        self._run = run
        self._board = _board(run.path / "tensorboard" / self.SOURCE)
        self._handlers: list[logging.Handler] = [logging.FileHandler(run.log(self.SOURCE)), _Notify(notify)]
        self._handlers[0].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._before = (log.level, log.propagate)
        log.setLevel(logging.INFO)
        log.propagate = False
        for handler in self._handlers:
            log.addHandler(handler)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
        """One training step's numbers; None is left out."""
        given = {k: v for k, v in numbers.items() if v is not None}
        append_line(
            self._run.metrics_path, {"time": time.time(), "source": self.SOURCE, "step": step, **given}
        )
        if self._board is not None:
            for name, value in given.items():
                self._board.add_scalar(f"rollout/{name}", float(value), step)
            self._board.flush()

    def evaluation(self, when: str, step: int, episodes: Any) -> None:
        """One line a task in evals.jsonl."""
        for e in episodes:
            append_line(
                self._run.path / "evals.jsonl",
                {
                    "when": when,
                    "step": step,
                    "task_id": e.item.task_id,
                    "session_id": e.session_id,
                    "outcome": e.outcome,
                    "reward": e.reward,
                    "calls": e.sealed.calls_total,
                    "seconds": round(e.seconds, 3),
                },
            )

    def close(self) -> None:
        for handler in self._handlers:
            log.removeHandler(handler)
            handler.close()
        log.level, log.propagate = self._before
        self._handlers = []
        if self._board is not None:
            self._board.close()
            self._board = None


class _Notify(logging.Handler):
    """Warnings for the user's eyes: the sentence, and of a traceback only its last line."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._notify = notify

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text += f"\n    {type(error).__name__}: {error} (traceback in logs/controller.log)"
        self._notify(text)


def _board(path: Path) -> Any:
    """A TensorBoard writer that needs no torch, or None where tensorboard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from tensorboard.summary import Writer  # type: ignore[import-not-found]

    return Writer(str(path))
