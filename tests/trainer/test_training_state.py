"""What a training state holds: every number training depends on, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from killed_trainer import in_ranks
from trainer_kit import make_model

from areal_agent.errors import ConfigError, TrainerError
from areal_agent.rundir import newest_state, state_folders
from areal_trainers import state as states
from areal_trainers.checkpoint import gathered
from areal_trainers.model import Policy, load_causal_lm, shard
from areal_trainers.optim import Optimizer
from areal_trainers.platform import get_platform
from areal_trainers.ranks import Ranks, join_ranks
from areal_trainers.state import TrainingState


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with join_ranks(get_platform("cpu")) as joined:
        yield joined


def build(model: Path, ranks: Ranks, folder: Path, keep: int = 2) -> tuple[Policy, Optimizer, TrainingState]:
    policy = shard(load_causal_lm(model), ranks.mesh)
    optimizer = Optimizer(policy.parameters(), learning_rate=0.01, schedule="linear", total_steps=9)
    parts = {"policy": (policy.lm, optimizer)}
    return policy, optimizer, TrainingState(parts, ranks, get_platform("cpu"), folder, keep)


def step(policy: Policy, optimizer: Optimizer, n: int) -> None:
    """A gradient that depends on the element and on n, the same for any sharding."""
    for p in policy.parameters():
        p.grad = p.detach() * 0.1 * n + 0.01
    optimizer.step()


def values(policy: Policy, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    out = {name: tensor.clone() for name, tensor in gathered(policy.lm)}
    for name, p in policy.lm.named_parameters():
        for moment, tensor in optimizer.moments(p).items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[union-attr]
            out[f"{moment} {name}"] = whole.clone()
    return out


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[k], b[k]) for k in a)


def test_training_goes_on_bit_for_bit(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    policy, optimizer, saved = build(model, ranks, tmp_path / "state")
    for n in range(3):
        step(policy, optimizer, n)
    torch.manual_seed(7)
    saved.save(3, {"steps": 3})
    step(policy, optimizer, 3)  # while it is written: what is saved is the copy
    saved.wait()
    random = torch.rand(4)

    other, its, loaded = build(model, ranks, tmp_path / "state")
    torch.manual_seed(1)
    progress = loaded.load()
    assert progress is not None
    assert (progress["version"], progress["extra"]) == (3, {"steps": 3})
    assert its.steps == 3
    assert torch.equal(torch.rand(4), random)
    assert not same(values(other, its), values(policy, optimizer))
    step(other, its, 3)
    assert its.learning_rate == optimizer.learning_rate
    assert same(values(other, its), values(policy, optimizer))


def test_the_newest_are_kept_and_what_is_half_written_is_none(
    tmp_path: Path, model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state"
    policy, optimizer, saved = build(model, ranks, folder)
    assert saved.load() is None
    for version in (1, 2, 3):
        step(policy, optimizer, version)
        saved.save(version)
    saved.wait()
    assert [f.name for f in state_folders(folder)] == ["step-000002", "step-000003"]

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(states, "_flush", full)
    saved.save(4)
    with pytest.raises(TrainerError, match=r"version 4 was not written: OSError.*No space left.*step-000003"):
        saved.save(5)
    assert newest_state(folder) == folder / "step-000003"
    build(model, ranks, folder)
    assert sorted(f.name for f in folder.iterdir()) == ["step-000002", "step-000003"]


def test_the_state_of_another_model_is_refused(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    policy, optimizer, saved = build(model, ranks, tmp_path / "state")
    step(policy, optimizer, 1)
    saved.save(1)
    saved.wait()
    _, _, other = build(make_model(tmp_path / "untied", "qwen3 untied"), ranks, tmp_path / "state")
    with pytest.raises(ConfigError, match=r"has no policy/exp_avg/lm_head.weight.*another model"):
        other.load()


def _rank(model: Path, folder: Path, out: Path) -> None:
    with join_ranks(get_platform("cpu")) as ranks:
        policy, optimizer, saved = build(model, ranks, folder)
        for n in range(3):
            step(policy, optimizer, n)
        saved.save(3)
        saved.wait()
        whole = values(policy, optimizer)
        if ranks.first:
            torch.save(whole, out)


def test_saved_by_two_ranks_loaded_by_one(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    in_ranks(_rank, 2, model, tmp_path / "state", tmp_path / "whole.pt")
    policy, optimizer, loaded = build(model, ranks, tmp_path / "state")
    progress = loaded.load()
    assert progress is not None
    assert progress["ranks"] == 2
    assert same(values(policy, optimizer), torch.load(tmp_path / "whole.pt", weights_only=True))


def test_export_writes_the_newest_state_as_a_model(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    from test_loop import make_run
    from transformers import AutoModelForCausalLM

    from areal_trainers.export import export_run

    run = make_run(tmp_path, model)
    with pytest.raises(ConfigError, match="has no training state yet"):
        export_run(run.path)
    policy, optimizer, saved = build(model, ranks, run.state_path)
    step(policy, optimizer, 1)
    saved.save(1)
    saved.wait()
    folder = export_run(run.path)
    assert folder == run.path / "export" / "step-000001"
    assert (folder / "tokenizer.json").exists()
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert same(dict(gathered(exported)), dict(gathered(policy.lm)))
