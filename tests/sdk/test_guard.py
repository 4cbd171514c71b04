"""Nothing started under a guard outlives its starter, its guard, or its own end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from processes import alive, wait_for

from areal_agent.errors import ArealError
from areal_agent.launch import guard
from areal_agent.launch.process import Guarded, tail

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="subreapers are Linux's")

# A server with a child that ignores SIGTERM and a grandchild in a session of its own (a daemon): the
# three kinds of process that a plain kill of the parent leaves behind.
TREE = textwrap.dedent("""
    import os, signal, socket, subprocess, sys, time
    out = sys.argv[1]
    s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
    os.set_inheritable(s.fileno(), True)
    stubborn = subprocess.Popen([sys.executable, "-c",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"],
        close_fds=False)
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        with open(out + ".daemon", "w") as f: f.write(str(os.getpid()))
        time.sleep(300)
    while not os.path.exists(out + ".daemon") or not open(out + ".daemon").read(): time.sleep(0.01)
    time.sleep(0.2)
    with open(out + ".tmp", "w") as f:
        f.write(f"{os.getpid()} {stubborn.pid} {open(out + '.daemon').read()} {s.getsockname()[1]}")
    os.rename(out + ".tmp", out)
    time.sleep(300)
""")


def read_tree(path: Path) -> tuple[list[int], int]:
    wait_for(path.exists, 20)
    *pids, port = map(int, path.read_text().split())
    return pids, port


def assert_gone(pids: list[int], port: int, seconds: float = 15) -> None:
    wait_for(lambda: not any(map(alive, pids)), seconds)
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", port))


@pytest.fixture
def tree(tmp_path):
    path = tmp_path / "pids"
    g = Guarded.start([sys.executable, "-c", TREE, str(path)], log_path=tmp_path / "log", grace=0.5)
    pids, port = read_tree(path)
    assert all(map(alive, pids))
    yield g, pids, port
    g.terminate()
    wait_for(lambda: not any(map(alive, pids)), 5)


def test_terminate_ends_the_whole_tree(tree):
    g, pids, port = tree
    assert g.terminate() == 128 + signal.SIGTERM
    assert_gone(pids, port, 0.5)


async def test_terminate_from_an_event_loop(tmp_path):
    path = tmp_path / "pids"
    g = await Guarded.astart([sys.executable, "-c", TREE, str(path)], log_path=tmp_path / "log", grace=0.5)
    pids, port = read_tree(path)
    await g.aterminate()
    assert_gone(pids, port, 0.5)


def test_the_commands_own_end_takes_its_leftovers_along(tree):
    g, pids, port = tree
    os.kill(g.pid, signal.SIGKILL)
    assert g.wait(15) == 128 + signal.SIGKILL
    assert_gone(pids, port, 0.5)


def test_kill_9_of_the_outer_guard_leaves_nothing(tree):
    g, pids, port = tree
    os.kill(g.guard_pid, signal.SIGKILL)
    assert_gone(pids, port)


def test_kill_9_of_the_inner_guard_leaves_nothing(tree):
    g, pids, port = tree
    (inner,) = [p for p in guard.descendants(g.guard_pid) if p not in pids]
    os.kill(inner, signal.SIGKILL)
    assert_gone(pids, port)


def test_kill_9_of_both_guards_takes_the_command_along(tree):
    g, pids, _ = tree
    rest = [p for p in guard.descendants(g.guard_pid) if p not in pids]
    for pid in (*rest, g.guard_pid):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not alive(g.pid), 5)
    for pid in pids:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_guard_ends_the_tree(tree, number):
    g, pids, port = tree
    os.kill(g.guard_pid, number)
    assert_gone(pids, port)


PARENT = textwrap.dedent("""
    import os, sys, time
    from areal_agent.launch.process import Guarded
    out = sys.argv[2]
    g = Guarded.start([sys.executable, "-c", sys.argv[1], out], log_path=out + ".log", grace=0.5)
    if "fork" in sys.argv[3:] and os.fork() == 0:
        time.sleep(300)  # inherits the lifeline: its write end stays open after the parent is gone
    time.sleep(300)
""")


@pytest.mark.parametrize("extra", [[], ["fork"]])
def test_kill_9_of_the_starter_leaves_nothing(tmp_path, extra):
    path = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, TREE, str(path), *extra])
    pids, port = read_tree(path)
    forked = [p for p in guard.descendants(parent.pid) if f"{p}" and p not in pids]
    parent.kill()
    parent.wait()
    try:
        assert_gone(pids, port)
    finally:
        for pid in forked:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_kill_9_reaches_through_nested_guards(tmp_path):
    """controller → guard → gateway → guard → engine: killing the gateway ends the engine."""
    path = tmp_path / "pids"
    g = Guarded.start(
        [sys.executable, "-c", PARENT, TREE, str(path)], log_path=tmp_path / "outer.log", grace=5
    )
    pids, port = read_tree(path)
    os.kill(g.pid, signal.SIGKILL)
    g.wait(15)
    assert_gone(pids, port, 0.5)


def test_the_exit_code_is_the_commands(tmp_path):
    g = Guarded.start(
        [sys.executable, "-c", "import sys; print('last words'); sys.exit(7)"], log_path=tmp_path / "l"
    )
    assert g.wait(20) == 7
    assert g.tail(1) == ["last words"]
    assert g.terminate() == 7


def test_a_command_that_cannot_start_is_a_sentence(tmp_path):
    with pytest.raises(ArealError, match=r"cannot start 'no-such-program'.*No such file"):
        Guarded.start(["no-such-program"], log_path=tmp_path / "l")


def test_the_command_closes_in_its_own_order_within_the_grace(tmp_path):
    code = (
        "import signal, sys, time\n"
        "def bye(*_): time.sleep(0.3); print('closed'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, bye); print('up', flush=True); time.sleep(300)"
    )
    g = Guarded.start([sys.executable, "-c", code], log_path=tmp_path / "l", grace=10)
    wait_for(lambda: g.tail() == ["up"], 20)
    assert g.terminate() == 0
    assert g.tail() == ["up", "closed"]


def test_the_guard_runs_as_a_module_and_hands_on_its_stdin_with_another_lifeline(tmp_path):
    read, write = os.pipe()
    module = [sys.executable, "-m", "areal_agent.launch.guard", "--lifeline", str(read), "--"]
    done = subprocess.run(
        [*module, sys.executable, "-c", "print(input()[::-1])"],
        input="abc\n",
        capture_output=True,
        text=True,
        pass_fds=(read,),
        timeout=30,
        check=False,
    )
    os.close(read)
    os.close(write)
    assert (done.stdout, done.returncode) == ("cba\n", 0)


def test_tail_of_a_missing_log_is_empty(tmp_path):
    assert tail(tmp_path / "none") == []
