"""A trainer killed at any moment and resumed ends with the parameters of one never killed, bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_trainer import PLACES, run_trainer
from safetensors.torch import load_file
from test_loop import make_run
from trainer_kit import MiniGateway, make_model

from areal_agent.rundir import RunDir, state_folders

STEPS = 5
TRAINER: dict[str, Any] = {
    "steps": STEPS,
    "checkpoint_every": 2,
    "minibatches": 2,
    "warmup_steps": 3,
    "schedule": "cosine",
    "weight_decay": 0.01,
}


def train(
    run: RunDir, gateway: MiniGateway, *options: str, kill: tuple[str, int] | None = None
) -> tuple[int, str]:
    environment = {"AREAL_GATEWAY_URL": gateway.url, "AREAL_ADMIN_KEY": MiniGateway.KEY}
    arguments = ["--run-dir", str(run.path), *options]
    return run_trainer(arguments, environment, run.log("trainer"), kill)


def weights(run: RunDir) -> dict[str, torch.Tensor]:
    return load_file(run.path / "checkpoints" / "latest" / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("resume") / "model")


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    run = make_run(tmp_path_factory.mktemp("whole"), model, **TRAINER)
    with MiniGateway(model, stale=True) as gateway:
        code, output = train(run, gateway)
    assert code == 0, output
    return weights(run)


CALL = {"update": 6, "push begun": 20, "checkpoint begun": 2, "checkpoint half written": 2}
"""The third step, or the second checkpoint (version 4), where a phase has several calls or one a checkpoint."""


@pytest.mark.parametrize("phase", PLACES)
def test_killed_at_a_phase_and_resumed(
    tmp_path: Path, model: Path, uninterrupted: dict[str, torch.Tensor], phase: str
) -> None:
    run = make_run(tmp_path, model, **TRAINER)
    with MiniGateway(model, stale=True) as gateway:
        code, output = train(run, gateway, kill=(phase, CALL.get(phase, 3)))
        assert code == -signal.SIGKILL, output
        assert 0 < gateway.version < STEPS
        start = run.resumable_version()
        code, output = train(run, gateway, "--resume")
    assert code == 0, output
    assert same(weights(run), uninterrupted)
    pushed = [(b["version"], b["force"]) for path, b in gateway.calls if path == "weights/begin"]
    assert [v for v, forced in pushed if forced] == [start]  # a resumed trainer first gives what it holds
    assert pushed[-1] == (STEPS, False)
    summary = run.read("trainer.json") or {}
    assert (summary["steps"], summary["final_version"]) == (STEPS, STEPS)
    assert summary["tokens_trained"] == STEPS * 15 * 6
    assert [f.name for f in state_folders(run.state_path)] == ["step-000004", "step-000005"]
    assert {f.name for f in run.state_path.iterdir()} == {"step-000004", "step-000005"}
