"""A trainer killed at any moment and resumed ends with the parameters of one never killed, bit for bit."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_trainer import PLACES, run_trainer
from safetensors.torch import load_file
from test_loop import make_run
from trainer_kit import MiniGateway, make_model

from areal_agent.errors import GatewayError
from areal_agent.rundir import RunDir, newest_state, state_folders
from areal_trainers import main, trainer
from areal_trainers.batch import prepare
from areal_trainers.heartbeat import Heartbeat
from areal_trainers.platform import get_platform
from areal_trainers.ranks import join_ranks

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
    run: RunDir, gateway: MiniGateway, *options: str, kill: tuple[str, int] | None = None, ranks: int = 1
) -> tuple[int, str]:
    environment = {"AREAL_GATEWAY_URL": gateway.url, "AREAL_ADMIN_KEY": MiniGateway.KEY}
    arguments = ["--run-dir", str(run.path), *options]
    return run_trainer(arguments, environment, run.log("trainer"), kill, ranks=ranks)


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


def test_one_of_two_ranks_killed_and_both_resumed(tmp_path: Path, model: Path) -> None:
    """Against two ranks that were never killed: their shards, their moments, bit for bit."""
    results = []
    for name, kill in (("whole", None), ("killed", ("update", CALL["update"]))):
        (tmp_path / name).mkdir()
        run = make_run(tmp_path / name, model, **TRAINER, ranks=2)
        with MiniGateway(model, stale=True) as gateway:
            code, output = train(run, gateway, kill=kill, ranks=2)
            if kill is not None:
                assert code == -signal.SIGKILL, output
                assert run.resumable_version() == 2
                code, output = train(run, gateway, "--resume", ranks=2)
            assert code == 0, output
        results.append(weights(run))
    assert same(*results)


@pytest.mark.parametrize("heard", [True, False])
def test_a_lease_outlives_a_step_longer_than_itself_while_its_trainer_is_heard(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    """Every step takes 3 leases' length; without the heartbeat the same run ends at its first ack."""
    run = make_run(tmp_path, model, steps=2, lease_s=1.2)

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(3.6)
        return prepare(*args, **kwargs)

    monkeypatch.setattr(trainer, "prepare", slowly)
    if not heard:
        monkeypatch.setattr(Heartbeat, "_beat", lambda self: None)
    platform = get_platform("cpu")
    with MiniGateway(model, expire=True) as gateway, join_ranks(platform) as ranks:
        work = (run.read_config(), run, platform, ranks, (gateway.url, MiniGateway.KEY))
        if heard:
            main.run_training(*work)
        else:
            with pytest.raises(GatewayError, match=r"lease-1 ended before it was acked.*lease_s = 1.2 s"):
                main.run_training(*work)
        assert gateway.acked == (["lease-1", "lease-2"] if heard else [])
        # A batch that was trained and not acked is in the weights: no state may go on from them.
        assert (newest_state(run.state_path) is not None) == heard
