"""Ctrl-C, or kill -9 of the user's process, in the middle of a run: nothing of the run is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from process_tree import descendants, left_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

START_S = 300


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_is_left_of_a_run_whose_controller_goes(signal_number, code, blank_model, examples, tmp_path):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "areal_agent.cli", "train", str(examples / "calculator.py")]
    command += ["--model", str(blank_model), "--engines", "1", "--run-dir", str(run_dir), "--steps", "200"]
    command += [
        "--set",
        "eval.tasks=0",
        "--set",
        "rollout.groups_per_step=2",
        "--set",
        "rollout.group_size=2",
    ]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        metrics = run_dir / "metrics.jsonl"
        end = time.monotonic() + START_S
        while not (metrics.exists() and '"trainer"' in metrics.read_text()):
            assert process.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < end, f"no training step after {START_S} s"
            time.sleep(0.2)
        below = descendants(process.pid)
        for part in ("areal_agent.cli gateway", "areal_trainers.main", "vllm.entrypoints"):
            assert any(part in p.command for p in below), part
        process.send_signal(signal_number)
        assert process.wait(60) == code
        assert not left_of(below, within_s=20)
        assert "Traceback" not in (tmp_path / "out").read_text()
    finally:
        process.kill()
        process.wait()
