"""Processes below a process, and whether they ended. Linux: reads /proc."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process and when it began, so that a pid used again is not mistaken for it."""

    pid: int
    began: int
    command: str


def descendants(pid: int) -> set[Process]:
    """Every living process below `pid`, whatever session or group it moved to."""
    parents: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (seen := _look(int(entry.name))):
            parents.setdefault(seen[0], []).append(seen[1])
    found: set[Process] = set()
    below = [pid]
    while below:
        for process in parents.get(below.pop(), []):
            found.add(process)
            below.append(process.pid)
    return found


def left_of(processes: set[Process], within_s: float) -> set[Process]:
    """Waits for all of them to end; returns those that did not within `within_s`."""
    end = time.monotonic() + within_s
    while left := {p for p in processes if (seen := _look(p.pid)) and seen[1].began == p.began}:
        if time.monotonic() > end:
            return left
        time.sleep(0.1)
    return set()


def _look(pid: int) -> tuple[int, Process] | None:
    """(parent, process); None for what has ended, zombies included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else (int(fields[1]), Process(pid, int(fields[19]), command))
