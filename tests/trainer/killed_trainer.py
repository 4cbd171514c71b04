"""A trainer in a process of its own, which may kill itself (SIGKILL) at one phase of one step.

    exit_code, output = run_trainer(arguments, environment, log, ("proximal", 3))

Processes are forked from one that has imported torch already, or the imports would be most of a test's time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from areal_trainers import buckets, main, optim, source, state, trainer
from areal_trainers.client import TrainerClient

torch.set_num_threads(1)

PLACES: dict[str, tuple[Any, str, str]] = {
    "lease": (source.BatchSource, "next", "after"),
    "advantages": (trainer, "prepare", "after"),
    "proximal": (trainer, "check_gap", "before"),
    "update": (optim.Optimizer, "step", "after"),
    "push begun": (buckets.Packer, "pack", "after"),
    "push received": (TrainerClient, "commit", "before"),
    "committed, not acked": (source.BatchSource, "ack", "before"),
    "acked": (source.BatchSource, "ack", "after"),
    "checkpoint begun": (FileSystemWriter, "write_data", "before"),
    "checkpoint half written": (state.TrainingState, "_complete", "before"),
    "checkpoint not named": (state, "_flush", "before"),
}
"""Phase -> (object, function, when), each called once a step or once a checkpoint."""


def kill_at(place: tuple[Any, str, str], call: int) -> None:
    """The process dies at the `call`-th call of a function, before or after it did its work."""
    owner, name, when = place
    original: Callable[..., Any] = getattr(owner, name)
    count = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        dies = count == call
        result = None if dies and when == "before" else original(*args, **kwargs)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, wrapper)


def run_trainer(
    arguments: list[str], environment: dict[str, str], log: Path, kill: tuple[str, int] | None = None
) -> tuple[int, str]:
    """`areal_trainers.main` to its end, or to its death -> (exit code, what it printed)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["areal_trainers.main"])
    process = context.Process(target=_run, args=(arguments, environment, log, kill))
    process.start()
    process.join(110)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode, log.read_text()


def _run(arguments: list[str], environment: dict[str, str], log: Path, kill: tuple[str, int] | None) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.update(environment)
    if kill is not None:
        kill_at(PLACES[kill[0]], kill[1])
    sys.exit(main.main(arguments))
