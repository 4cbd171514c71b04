"""A trainer in a process of its own, which may kill itself (SIGKILL) at one phase of one step.

    exit_code, output = run_trainer(arguments, environment, log, ("proximal", 3))

Processes are forked from one that has imported torch already, or the imports would be most of a test's time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
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
    arguments: list[str],
    environment: dict[str, str],
    log: Path,
    kill: tuple[str, int] | None = None,
    *,
    program: Callable[[list[str]], int] = main.main,
    ranks: int = 1,
) -> tuple[int, str]:
    """`program` on every rank to its end, or to its death -> (exit code, what it printed).

    As torchrun does, the others are ended when one fails. The one that kills itself is the last.
    """
    log.write_text("")
    places = [environment | where for where in rank_environments(ranks)]
    kills = [None] * (ranks - 1) + [kill]
    processes = [
        _context().Process(target=_run, args=(program, arguments, place, log, how))
        for place, how in zip(places, kills, strict=True)
    ]
    return join(processes), log.read_text()


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """What torchrun would tell each rank; nothing where there is one, as in a plain process."""
    if ranks == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as s:
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    return [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)} | meet for rank in range(ranks)
    ]


def in_ranks(function: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """`function(*arguments)` in so many processes, as ranks of one group. Each has to end well."""
    processes = [
        _context().Process(target=_call, args=(place, function, arguments))
        for place in rank_environments(ranks)
    ]
    assert join(processes) == 0


def join(processes: Sequence[Any], seconds: float = 110) -> int:
    """Start them and wait -> the exit code of the first that failed, whose failure ends the others; else 0."""
    for process in processes:
        process.start()
    end, code = time.monotonic() + seconds, 0
    while any(p.is_alive() for p in processes):
        code = next((p.exitcode for p in processes if p.exitcode), 0)
        if code or time.monotonic() > end:
            for process in processes:
                process.kill()
        time.sleep(0.01)
    return code or next((p.exitcode for p in processes if p.exitcode), 0)


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["areal_trainers.main", "areal_trainers.sft"])
    return context


def _call(environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)
    function(*arguments)


def _run(
    program: Callable[[list[str]], int],
    arguments: list[str],
    environment: dict[str, str],
    log: Path,
    kill: tuple[str, int] | None,
) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    torch.set_num_threads(1)
    os.environ.update(environment)
    if kill is not None:
        kill_at(PLACES[kill[0]], kill[1])
    sys.exit(program(arguments))
