"""The whole trainer as a process, under torchrun, against a gateway that samples with what it was sent."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from trainer_kit import MiniGateway, make_model, reference
from transformers import AutoModelForCausalLM

from areal_agent.config import RunConfig
from areal_agent.rundir import RunDir


def make_run(tmp_path: Path, model: Path, **trainer: Any) -> RunDir:
    return RunDir.create(
        RunConfig.parse(
            {
                "model": str(model),
                "run_dir": str(tmp_path / "run"),
                "rollout": {"groups_per_step": 4, "group_size": 4, "max_staleness": 1},
                "trainer": {"steps": 3, "learning_rate": 1e-2, "microbatch_tokens": 96, "wait_s": 20}
                | trainer,
                "weights": {"join_timeout_s": 10, "transfer_timeout_s": 10, "bucket_mib": 0.01},
            }
        )
    )


def start(run: RunDir, url: str, ranks: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*command, "-m", "areal_trainers.main", "--run-dir", str(run.path)],
        env=os.environ
        | {"AREAL_GATEWAY_URL": url, "AREAL_ADMIN_KEY": MiniGateway.KEY, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 90) -> str:
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        process.kill()


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str], timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_two_ranks_train_broadcast_and_stay_exact(tmp_path: Path, model: Path) -> None:
    run = make_run(tmp_path, model, ranks=2, steps=8)
    with MiniGateway(model, stale=True) as gateway:
        process = start(run, gateway.url, ranks=2)
        output = finish(process)
    assert process.returncode == 0, output

    # Every batch was acked, after its version was live, and none given back.
    assert gateway.acked == [f"lease-{i}" for i in range(1, 9)]
    assert gateway.nacked == []
    story = [n for n in gateway.names() if n in ("trajectories/ack", "weights/commit")]
    assert story == ["weights/commit", "trajectories/ack"] * 8

    summary = run.read("trainer.json")
    assert summary is not None
    assert {k: summary[k] for k in ("steps", "final_version", "staleness_max", "skipped_steps")} == {
        "steps": 8,
        "final_version": 8,
        "staleness_max": 1,
        "skipped_steps": 0,
    }
    # The gateway's model knows only what was broadcast, so a small gap means exact weights and logprobs.
    assert 0 < summary["logprob_gap_max"] < 1e-4
    assert summary["tokens_trained"] == 8 * 15 * 6  # one of 16 sessions has no reward
    assert summary["peak_memory_mib"] > 50

    # The checkpoint is the fleet's last version, and loads in transformers.
    saved = AutoModelForCausalLM.from_pretrained(summary["checkpoint"])
    for (name, a), (_, b) in zip(saved.named_parameters(), gateway.models[8].named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert (run.path / "checkpoints" / "latest").resolve() == Path(summary["checkpoint"])
    assert any(
        not torch.equal(a, b) for a, b in zip(saved.parameters(), reference(model).parameters(), strict=True)
    )

    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    wanted = "reward_mean reward_std tokens staleness_mean logprob_gap loss grad_norm clip_fraction entropy lease_s"
    wanted += (
        " proximal_s reference_s forward_s backward_s gather_s step_s broadcast_s idle_s"
        " behaviour_weight_max groups_zero_advantage"
    )
    assert set(wanted.split()) <= set(lines[0])
    assert all(line["source"] == "trainer" for line in lines)
    assert lines[0]["behaviour_weight_mean"] == pytest.approx(1, abs=1e-4)  # nothing is stale at first
    assert list((run.path / "tensorboard" / "trainer").iterdir())


@pytest.mark.parametrize(
    ("ranks", "algorithm", "wanted"),
    [
        (2, {"recipe": "ppo", "correction": "truncate"}, "value_loss explained_variance value_clip_fraction"),
        (1, {"recipe": "grpo", "correction": "mask", "proximal": "loglinear"}, "kl_reference entropy"),
    ],
)
def test_a_recipe_brings_its_models_and_metrics(
    tmp_path: Path, model: Path, ranks: int, algorithm: dict[str, Any], wanted: str
) -> None:
    run = make_run(tmp_path, model, ranks=ranks, steps=2)
    config = run.read_config().model_dump(mode="json", exclude={"algorithm"})
    run.write("config.json", config | {"algorithm": algorithm})
    with MiniGateway(model, stale=True) as gateway:
        process = start(run, gateway.url, ranks)
        output = finish(process)
    assert process.returncode == 0, output
    assert gateway.acked == ["lease-1", "lease-2"]
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    assert {*wanted.split(), "groups_dropped", "advantage_abs_mean"} <= set(lines[1])
    # loglinear spares the forward that compares with the engine; the probe does it after each update.
    compared = "logprob_gap_tokens" if ranks == 2 else "probe_tokens"
    assert lines[0][compared] > 0


def test_asynchronous_training_without_a_chosen_correction_does_not_start(
    tmp_path: Path, model: Path
) -> None:
    run = make_run(tmp_path, model)
    config = run.read_config().model_dump(mode="json", exclude={"algorithm"})
    run.write("config.json", config | {"algorithm": {"recipe": "gspo"}})
    with MiniGateway(model) as gateway:
        process = start(run, gateway.url)
        output = finish(process)
    assert process.returncode == 1
    assert "Choose algorithm.correction: truncate or mask" in output
    assert gateway.leases == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_restarted_gets_the_current_weights_again(
    tmp_path: Path, model: Path, ranks: int
) -> None:
    run = make_run(tmp_path, model, ranks=ranks)
    with MiniGateway(model, crash_after=1) as gateway:
        process = start(run, gateway.url, ranks)
        output = finish(process)
    assert process.returncode == 0, output
    assert [b["version"] for path, b in gateway.calls if path == "weights/begin"] == [1, 1, 2, 3]
    assert output.count("an engine waits for version 1: pushing it again\n") == 1
    # What it was given again is what the trainer holds, or the gap of the next batch would stop the run.
    assert gateway.acked == ["lease-1", "lease-2", "lease-3"]


def test_a_failed_push_again_is_tried_at_the_next_poll(tmp_path: Path) -> None:
    from areal_agent import wire
    from areal_agent.errors import WeightUpdateError
    from areal_agent.trajectory import Batch
    from areal_trainers.source import BatchSource

    blobs, tried = [None, None, wire.pack(Batch("lease-1", 7))], []

    class Client:
        def lease(self, **_: object) -> bytes | None:
            return blobs.pop(0)

        def needs_weights(self) -> bool:
            return True

        def nack(self, lease_id: str) -> None:
            assert lease_id == "lease-1"

    class Alone:
        first, size = True, 1
        broadcast_bytes = staticmethod(bytes)
        max = staticmethod(list)

    def repush(version: int) -> None:
        tried.append(version)
        raise WeightUpdateError("it crashed again")

    source = BatchSource(Client(), Alone(), RunConfig())  # type: ignore[arg-type]
    assert source.next(7, repush).lease_id == "lease-1"
    source.give_back()  # which ends the renewals too
    assert tried == [7, 7]


def test_rewards_rise(tmp_path: Path, model: Path) -> None:
    run = make_run(tmp_path, model, steps=25)
    with MiniGateway(model, stale=True) as gateway:
        process = start(run, gateway.url)
        output = finish(process)
    assert process.returncode == 0, output
    rewards = np.array(gateway.rewards).reshape(25, -1).mean(1)
    assert rewards[-3:].mean() > rewards[:3].mean() + 0.2, rewards


def test_sigterm_gives_the_lease_back_at_once(tmp_path: Path, model: Path) -> None:
    run = make_run(tmp_path, model, steps=10**6)
    with MiniGateway(model) as gateway:
        process = start(run, gateway.url)
        wait_until(lambda: gateway.version >= 2, process)
        process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        output = finish(process, 20)
        took = time.monotonic() - begin
    assert process.returncode == 143, output
    assert took < 10  # the controller ends it by force after that
    assert len(gateway.acked) + len(gateway.nacked) >= gateway.leases - 1  # all but one just on its way
    assert gateway.update is None
    summary = run.read("trainer.json")
    assert summary is not None
    assert "signal" in summary["error"]
    assert summary["final_version"] >= 1
    # What it had learnt is kept, but for a signal within an optimiser step, which is said.
    if "no checkpoint of the last step" not in output:
        AutoModelForCausalLM.from_pretrained(summary["checkpoint"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_run_leaves_its_last_two_checkpoints(tmp_path: Path, model: Path, ranks: int) -> None:
    run = make_run(tmp_path, model, ranks=ranks, steps=9, checkpoint_every=2, wait_s=0.5)
    with MiniGateway(model, ready=5) as gateway:
        process = start(run, gateway.url, ranks)
        output = finish(process)
    assert process.returncode == 1, output
    summary = run.read("trainer.json")
    assert summary is not None
    assert "no batch of 4 groups" in summary["error"]
    folder = run.path / "checkpoints"
    assert summary["checkpoint"] == str(folder / "step-000005")
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-000004", "step-000005"]
    assert (folder / "latest").resolve() == folder / "step-000005"
    saved = AutoModelForCausalLM.from_pretrained(summary["checkpoint"])
    for (name, a), (_, b) in zip(saved.named_parameters(), gateway.models[5].named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_nothing_is_gathered_when_other_ranks_may_be_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from areal_trainers.checkpoint import Checkpoints

    class Written:
        """A state of which nothing is left to be written; saving would fail."""

        def wait(self) -> None:
            pass

    lm: Any = None  # touching it would fail
    kept = Checkpoints(lm, cast(Any, Written()), tmp_path, tmp_path, 0, 2, write=True)
    kept.rescue({}, together=True)
    assert not capsys.readouterr().out  # no step was taken, so nothing is lost
    with kept.changing(1):
        pass
    kept.rescue({}, together=False)
    assert "the other ranks may not be there" in capsys.readouterr().out
    with pytest.raises(RuntimeError), kept.changing(2):
        raise RuntimeError
    kept.rescue({}, together=True)
    assert "within an optimiser step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gateway", "trainer", "sentence"),
    [
        ({"corrupt": 0.5}, {}, r"engine and trainer disagree by 0.5 nats"),
        (
            {"corrupt_probe": 0.5},
            {},
            "right after version 1 was committed: the engine does not compute with the weights",
        ),
        ({"ready": 1}, {"wait_s": 0.5}, r"no batch of 4 groups became ready within trainer.wait_s = 0.5 s"),
        ({"ready": 1}, {"wait_s": 0.5}, "logs/gateway.log and GET /admin/status of the gateway say"),
    ],
)
def test_what_stops_training_is_one_sentence(
    tmp_path: Path, model: Path, gateway: dict[str, Any], trainer: dict[str, Any], sentence: str
) -> None:
    run = make_run(tmp_path, model, **trainer)
    with MiniGateway(model, **gateway) as mini:
        process = start(run, mini.url)
        output = finish(process)
    assert process.returncode == 1
    assert sentence in output
    assert "Traceback" not in output
    assert sentence in (run.read("trainer.json") or {})["error"]
    assert mini.leases == len(mini.acked) + len(mini.nacked)


def test_a_failing_rank_ends_the_others(tmp_path: Path, model: Path) -> None:
    run = make_run(tmp_path, model, ranks=2)
    with MiniGateway(model, corrupt=0.5) as gateway:
        process = start(run, gateway.url, ranks=2)
        output = finish(process, 60)
    assert process.returncode != 0
    assert output.count("engine and trainer disagree") == 1
    assert gateway.nacked == ["lease-1"]


@pytest.mark.parametrize(
    ("over", "sentence"),
    [
        ({"model": "/no/such/model"}, "model folder /no/such/model is not a folder"),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p = 0.9"),
        ({"trainer": {"platform": "npu"}}, "torch_npu is not installed"),
    ],
)
def test_settings_that_cannot_work_are_a_sentence(
    tmp_path: Path, model: Path, over: dict[str, Any], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from areal_trainers.main import main

    run = RunDir.create(RunConfig.parse({"model": str(model), "run_dir": str(tmp_path / "run")} | over))
    with socket.create_server(("127.0.0.1", 0)) as s:
        run.write("gateway.json", {"url": f"http://127.0.0.1:{s.getsockname()[1]}"})
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        try:
            assert main(["--run-dir", str(run.path)]) == 1
        finally:
            signal.signal(signal.SIGTERM, before[0])
            signal.signal(signal.SIGINT, before[1])
    assert sentence in capsys.readouterr().err


def test_without_a_run_folder_or_gateway(tmp_path: Path) -> None:
    from areal_agent.errors import ConfigError
    from areal_trainers.main import gateway_address

    with pytest.raises(ConfigError, match="no gateway: AREAL_GATEWAY_URL is not set"):
        gateway_address(RunDir(tmp_path), {})
