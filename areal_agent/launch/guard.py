"""Runs a command so that nothing of it survives the process that asked for it.

Invariant: when the starter goes (exit, crash, `kill -9`), when the guard is told to stop, or when the
guard itself is killed, the command and every process below it end, and with them their ports.

    python -m areal_agent.launch.guard [--grace SECONDS] [--lifeline FD] [--status FD] -- COMMAND ...

How: the lifeline (stdin unless `--lifeline`) is a pipe whose write end only the starter holds; its end
of file is the starter's death. The guard is two processes, both child subreapers (Linux): the outer one
watches the lifeline, the inner one owns the command. Killing the inner one re-parents the command's tree
to the outer one, killing the outer one closes the inner one's own lifeline; either then clears the tree.
Killing both at once still takes the command itself along (PR_SET_PDEATHSIG).
Ending is SIGTERM to the command, `--grace` seconds for it to close in its own order, SIGTERM to whatever
is left below, then SIGKILL. The exit code is the command's (128 + n when signal n ended it, 127 when it
could not be started). Without subreapers (not Linux) only the command's process group is ended.

Standard library only, and no import of this package: it also runs as a bare file under `python -I -S`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

TICK_S = 0.5
"""Between looks at the parent's pid: a forked copy of the starter may hold the lifeline open after it."""

LEFTOVER_GRACE_S = 2.0
"""Most seconds that processes left behind by the command get between SIGTERM and SIGKILL."""

KILL_WAIT_S = 10.0
"""A process that outlives SIGKILL this long sits in the kernel; nothing more can be done."""

OUTER_SLACK_S = 5.0
"""What the outer process adds to the inner one's own worst case before it takes over."""


def _prctl(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    return ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0


def descendants(root: int) -> list[int]:
    """Pids below `root` that are not zombies; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    dead: set[int] = set()
    try:
        entries = [int(e) for e in os.listdir("/proc") if e.isdigit()]
    except OSError:
        return []
    for pid in entries:
        try:
            with open(f"/proc/{pid}/stat", "rb") as f:
                # The command name may hold spaces and parentheses: fields count from the last ")".
                state, ppid = f.read().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it ended between the listing and the reading
        children.setdefault(int(ppid), []).append(pid)
        if state in (b"Z", b"X"):
            dead.add(pid)
    found: list[int] = []
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            todo.append(pid)
            if pid not in dead:
                found.append(pid)
    return found


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended first, which is what was wanted


class Signals:
    """SIGTERM, SIGINT, SIGHUP and SIGCHLD as bytes on a pipe that `select` can wait for."""

    def __init__(self) -> None:
        self.stop = False
        self._read, write = os.pipe()
        for fd in (self._read, write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _on_stop(self, *_: object) -> None:
        self.stop = True

    def wait(self, lifeline: int | None, timeout: float) -> None:
        """Until a signal, the lifeline's end (which sets `stop`), or the time-out in seconds."""
        fds = [self._read] if lifeline is None else [self._read, lifeline]
        ready, _, _ = select.select(fds, [], [], max(timeout, 0.0))
        if self._read in ready:
            os.read(self._read, 4096)
        if lifeline is not None and lifeline in ready and not os.read(lifeline, 4096):
            self.stop = True


class Reaper:
    """Collects every dead child, remembers the exit status of the one that matters."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None

    def collect(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                code = os.waitstatus_to_exitcode(status)
                self.code = code if code >= 0 else 128 - code


def clear(reaper: Reaper, group: int, grace: float) -> None:
    """End everything below this process: SIGTERM, `grace` seconds, SIGKILL until nothing is left."""
    reaper.collect()
    for pid in descendants(os.getpid()):
        _signal(pid, signal.SIGTERM)
    end = time.monotonic() + grace
    while time.monotonic() < end and descendants(os.getpid()):
        time.sleep(0.02)
        reaper.collect()
    end = time.monotonic() + KILL_WAIT_S
    while time.monotonic() < end:
        left = descendants(os.getpid())
        for pid in left:
            _signal(pid, signal.SIGKILL)
        reaper.collect()
        if not left:
            break
        time.sleep(0.02)
    else:
        print(f"guard: processes {left} outlived SIGKILL", file=sys.stderr, flush=True)
    if not sys.platform.startswith("linux"):
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return  # the group is empty, or its number now belongs to somebody else


def _inner(command: list[str], grace: float, lifeline: int, stdin: int, status: int | None) -> int:
    """Own the command until it ends or must; returns its exit code."""
    os.setsid()  # a signal to the outer process's group must not take both
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signals = Signals()
    me = os.getpid()

    def tie() -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != me:
            os._exit(128 + signal.SIGKILL)  # the guard died before the tie was made

    try:
        child = subprocess.Popen(command, stdin=stdin, start_new_session=True, preexec_fn=tie)
    except (OSError, ValueError) as e:
        if status is not None:
            os.write(status, f"error {e}\n".encode())
        print(f"guard: cannot start {command[0]!r}: {e}", file=sys.stderr, flush=True)
        return 127
    if status is not None:
        os.write(status, f"pid {child.pid}\n".encode())
        os.close(status)
    reaper = Reaper(child.pid)
    while not signals.stop and reaper.code is None:
        signals.wait(lifeline, 60.0)
        reaper.collect()
    if reaper.code is None:
        _signal(child.pid, signal.SIGTERM)
        end = time.monotonic() + grace
        while reaper.code is None and time.monotonic() < end:
            signals.wait(None, min(end - time.monotonic(), 0.1))
            reaper.collect()
    clear(reaper, child.pid, min(grace, LEFTOVER_GRACE_S) if reaper.code is not None else 0.0)
    child.returncode = reaper.code or 0  # reaped here, so Popen must not wait for it
    return 128 + signal.SIGKILL if reaper.code is None else reaper.code


def run(command: list[str], grace: float = 5.0, lifeline: int = 0, status: int | None = None) -> int:
    """Guard `command` until it ends; returns its exit code. See the module's docstring."""
    parent = os.getppid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    stdin = 0 if lifeline != 0 else subprocess.DEVNULL
    inner_read, inner_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(inner_write)
            os.close(lifeline)
            if lifeline == 0:
                os.open(os.devnull, os.O_RDONLY)  # keeps descriptor 0 taken
            code = _inner(command, grace, inner_read, stdin, status)
        finally:
            os._exit(code)  # the child of a fork must not run the parent's exit handlers
    os.close(inner_read)
    if status is not None:
        os.close(status)
    signals = Signals()
    reaper = Reaper(pid)
    deadline = float("inf")
    while reaper.code is None and time.monotonic() < deadline:
        signals.wait(None if signals.stop else lifeline, TICK_S)
        signals.stop = signals.stop or os.getppid() != parent
        if signals.stop and deadline == float("inf"):
            os.close(inner_write)
            deadline = time.monotonic() + grace + LEFTOVER_GRACE_S + KILL_WAIT_S + OUTER_SLACK_S
        reaper.collect()
    clear(reaper, pid, 0.0)  # nothing is left unless the inner process was killed or is stuck
    return 128 + signal.SIGKILL if reaper.code is None else reaper.code


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="guard", description="run a command that cannot outlive its starter"
    )
    parser.add_argument("--grace", type=float, default=5.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument(
        "--lifeline", type=int, default=0, help="descriptor whose end of file ends the command"
    )
    parser.add_argument("--status", type=int, default=None, help="descriptor told 'pid N' or 'error TEXT'")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ...")
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command given after --")
    return run(command, args.grace, args.lifeline, args.status)


if __name__ == "__main__":
    sys.exit(main())
