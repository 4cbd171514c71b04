"""A child process, its log, and the certainty that it ends with us.

Invariant: what `Guarded.start` started is gone, with all its descendants, once `terminate` returned or
once this process ended in whatever way (see guard.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_agent.errors import ArealError
from areal_agent.launch import guard

START_S = 20.0
"""Longest the guard may take to start the command; about 0.05 s on a quiet machine."""

TAIL_BYTES = 64 * 1024
"""How far from its end a log is read for its last lines."""


class Guarded:
    """A running command under its guard. Build with `start` (or `astart` inside an event loop).

    Attributes:
        pid: the command itself (not its guard), for looking at it or killing it in a test.
        guard_pid: the guard's outer process.
        log_path: where stdout and stderr of the command go (appended), or None.
    """

    def __init__(
        self,
        proc: subprocess.Popen[bytes],
        pid: int,
        command: Sequence[str],
        log_path: Path | None,
        grace: float,
    ) -> None:
        self._proc = proc
        self.pid = pid
        self.guard_pid = proc.pid
        self.command = list(command)
        self.log_path = log_path
        self.grace = grace

    @classmethod
    def start(
        cls,
        cmd: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        log_path: str | Path | None = None,
        grace: float = 5.0,
    ) -> Guarded:
        """Start `cmd`; returns once it runs. Blocks for about 50 ms.

        Args:
            env: the whole environment of the command; None inherits ours.
            log_path: file that stdout and stderr are appended to (folders are made); None inherits ours.
            grace: seconds the command gets between SIGTERM and SIGKILL.

        Raises:
            ArealError: the command cannot be started (no such program, no permission).
        """
        path = Path(log_path) if log_path is not None else None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        read, write = os.pipe()
        try:
            with contextlib.ExitStack() as stack:
                log = stack.enter_context(path.open("ab")) if path is not None else None
                options = ["--grace", str(grace), "--status", str(write)]
                proc = subprocess.Popen(
                    [sys.executable, "-I", "-S", guard.__file__, *options, "--", *map(str, cmd)],
                    env=dict(env) if env is not None else None,
                    cwd=cwd,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=(write,),
                    start_new_session=True,  # Ctrl-C reaches us alone; we end the rest in order
                )
            os.close(write)
            write = -1
            word, _, value = _read_line(read, START_S).partition(" ")
        finally:
            os.close(read)
            if write >= 0:
                os.close(write)
        if word != "pid":
            _close(proc)
            proc.wait()
            reason = value or f"its guard ended with code {proc.returncode}"
            raise ArealError(f"cannot start {cmd[0]!r}: {reason}")
        return cls(proc, int(value), list(map(str, cmd)), path, grace)

    @classmethod
    async def astart(
        cls,
        cmd: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        log_path: str | Path | None = None,
        grace: float = 5.0,
    ) -> Guarded:
        """`start` without blocking the event loop; a cancelled start leaves nothing running."""
        starting = asyncio.ensure_future(
            asyncio.to_thread(cls.start, cmd, env=env, cwd=cwd, log_path=log_path, grace=grace)
        )
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(ArealError):
                _close((await starting)._proc)
            raise

    def poll(self) -> int | None:
        """Exit code once the command and everything below it ended, else None."""
        return self._proc.poll()

    @property
    def running(self) -> bool:
        return self.poll() is None

    def wait(self, timeout: float | None = None) -> int:
        """Exit code; raises TimeoutError after `timeout` seconds."""
        try:
            return self._proc.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.command[0]} still runs after {timeout} s") from None

    async def await_exit(self, timeout: float | None = None) -> int:
        """`wait` for an event loop."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{self.command[0]} still runs after {timeout} s")
            await asyncio.sleep(0.05)
        return code

    def request_stop(self) -> None:
        """Cut the lifeline: the guard ends the command within its grace. Returns at once; idempotent."""
        _close(self._proc)

    def terminate(self, deadline: float | None = None) -> int:
        """End the command and everything below it; returns its exit code. Idempotent.

        Args:
            deadline: seconds to wait; None allows the grace and the guard's own kill time.

        Raises:
            TimeoutError: something below outlived even SIGKILL for that long.
        """
        self.request_stop()
        return self.wait(self._longest() if deadline is None else deadline)

    async def aterminate(self, deadline: float | None = None) -> int:
        """`terminate` for an event loop."""
        self.request_stop()
        return await self.await_exit(self._longest() if deadline is None else deadline)

    def tail(self, n: int = 20) -> list[str]:
        """The last `n` lines of the log; empty when there is none."""
        return tail(self.log_path, n) if self.log_path is not None else []

    def _longest(self) -> float:
        return self.grace + guard.LEFTOVER_GRACE_S + 2 * guard.KILL_WAIT_S + guard.OUTER_SLACK_S


def tail(path: str | Path, n: int = 20) -> list[str]:
    """The last `n` non-empty lines of a log file; empty when it cannot be read."""
    try:
        with open(path, "rb") as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - TAIL_BYTES))
            text = f.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-n:]


def _close(proc: subprocess.Popen[bytes]) -> None:
    if proc.stdin is not None and not proc.stdin.closed:
        proc.stdin.close()


def _read_line(fd: int, timeout: float) -> str:
    """One line, or what came before the end of file or the time-out (seconds)."""
    end, data = time.monotonic() + timeout, b""
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
        chunk = os.read(fd, 4096) if ready else b""
        if not chunk:
            break
        data += chunk
    return data.decode(errors="replace").strip()
