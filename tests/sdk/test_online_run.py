"""An online run from its command line: a real gateway, a real trainer, the example's service, a fake engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_folder import build_folder

import areal_agent
from areal_agent import online
from areal_agent.config import RunConfig
from areal_agent.errors import ConfigError
from areal_agent.rundir import RunDir

SERVICE = Path(__file__).parents[2] / "examples/agents/online_service.py"
STEPS = 10_000  # more than a test will ever see: Ctrl-C ends each run, however fast the machine is
SETTINGS = {
    "trainer.steps": STEPS,
    "trainer.wait_s": 0.5,  # an online run waits longer than that
    "trainer.logprob_gap_bound": 1e9,  # the fake engine samples by a policy of its own
    "trainer.microbatch_tokens": 512,
    "rollout.groups_per_step": 2,
    "rollout.group_size": 2,
    "sampling.max_tokens": 8,
    "fleet.max_model_len": 1024,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Qwen3 beside the tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = build_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    shape: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=320, tie_word_embeddings=True, **shape, **heads)).save_pretrained(
        folder
    )
    return folder


class Cli:
    """`areal-agent train --online ...` as a process, its output read from a file."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("wb") as out:
            command = [sys.executable, "-m", "areal_agent.cli", "train", "--online", *arguments]
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def until(self, pattern: str, timeout_s: float = 120.0) -> re.Match[str]:
        end = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.log.read_text())) is None:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)
        return found

    def until_step(self, step: int) -> None:
        """A run that is fast does not say every step."""
        end = time.monotonic() + 120.0
        while int(self.until(rf"(?s:.*)step (\d+)/{STEPS}  reward 0\.\d+")[1]) < step:
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)

    def service(self, stack: list[subprocess.Popen[bytes]]) -> None:
        """The example, started with what the run printed and nothing else."""
        invited = self.until(r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=\$\(cat (\S+)\)")
        key = Path(invited[2])
        assert key.stat().st_mode & 0o777 == 0o600
        environment = os.environ | {"OPENAI_BASE_URL": invited[1], "OPENAI_API_KEY": key.read_text().strip()}
        stack.append(
            subprocess.Popen([sys.executable, str(SERVICE)], env=environment, stdout=subprocess.PIPE)
        )


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def engine(processes: list[subprocess.Popen[bytes]]) -> str:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    fake = Path(__file__).parents[1] / "fakes/engine.py"
    processes.append(subprocess.Popen([sys.executable, str(fake), "--port", str(port), "--receiver", "gloo"]))
    return f"http://127.0.0.1:{port}"


def stopped_after(
    step: int, run: Cli, folder: RunDir, processes: list[subprocess.Popen[bytes]]
) -> dict[str, Any]:
    """The summary of a run that Ctrl-C ended once it had said that it is at this step or past it."""
    run.until_step(step)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 0, run.log.read_text()
    assert b"the run has ended" in processes.pop().communicate(timeout=30)[0]
    summary = folder.read("summary.json")
    assert summary is not None
    assert step <= summary["steps"] < STEPS
    return summary


@pytest.mark.timeout(300)
def test_a_service_is_trained_until_ctrl_c_and_further_after_a_resume(
    model: Path, engine: str, processes: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    folder = RunDir(tmp_path / "run")
    given = SETTINGS | {"fleet.attach": f"[{engine}]", "fleet.engines": 0}
    settings = [part for name, value in given.items() for part in ("--set", f"{name}={value}")]

    run = Cli(tmp_path / "first", "--model", str(model), "--run-dir", str(folder.path), *settings)
    processes.append(run.process)
    run.until("waiting for the service, without limit: 0 of 2 cohorts are whole")
    time.sleep(2.0)  # no traffic, for longer than trainer.wait_s
    run.service(processes)
    summary = stopped_after(2, run, folder, processes)
    stopped = summary["steps"]
    assert summary["final_version"] == stopped
    assert (summary["eval_before"], summary["eval_after"]) == (None, None)
    assert summary["groups"]["consumed"] == 2 * stopped
    assert 0 < summary["reward_first_step"] <= 1
    assert Path(summary["checkpoint"]).name == f"step-{stopped:06d}"
    assert (Path(summary["checkpoint"]) / "model.safetensors").stat().st_size > 0
    assert "of the service, in the first and the last step" in run.log.read_text()

    run = Cli(tmp_path / "second", "--resume", str(folder.path))
    processes.append(run.process)
    run.service(processes)
    summary = stopped_after(stopped + 2, run, folder, processes)
    assert summary["final_version"] == summary["steps"]
    assert summary["staleness_max"] <= 1
    lines = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    trained = [line["step"] for line in lines if line["source"] == "trainer"]
    assert trained == list(range(1, summary["steps"] + 1))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"dataset": [{"q": 1}]}, "no use for a dataset"),
        ({"reward": lambda task, result: 1.0}, "nothing to call a reward function"),
        ({"eval_dataset": [{"q": 1}]}, "nothing to call a reward function"),
        (
            {"agent": print, "eval_dataset": 0.1, "config": {"online": {"enabled": True}}},
            "no dataset to split",
        ),
    ],
)
def test_what_means_nothing_online_is_refused(arguments: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        areal_agent.train(**arguments)


def test_a_run_without_an_agent_is_online_and_one_with_is_not() -> None:
    config = RunConfig()
    assert not online.settle(config, print, None, [], None)
    assert not config.online.enabled
    assert online.settle(config, None, None, None, None)
    assert config.online.enabled


def test_the_second_ctrl_c_is_as_ever() -> None:
    stops = []
    with online.ctrl_c(lambda: stops.append(1)):
        signal.raise_signal(signal.SIGINT)
        assert stops == [1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
