"""Versions on disk: whole Hugging Face folders, or nothing; the last few, and those being read."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
import torch
from test_weights_sender import QUICK, shift
from trainer_kit import MiniGateway, make_model, reference
from transformers import AutoModelForCausalLM

from areal_agent.config import WeightsConfig
from areal_agent.errors import WeightUpdateError
from areal_agent.weights import LOCK_FILE
from areal_trainers import weight_folder
from areal_trainers.buckets import Packer
from areal_trainers.checkpoint import unique_tensors
from areal_trainers.client import TrainerClient
from areal_trainers.model import load_causal_lm, shard
from areal_trainers.platform import get_platform
from areal_trainers.ranks import join_ranks
from areal_trainers.weight_folder import WeightFolder
from areal_trainers.weights_sender import WeightsSender


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def folder_of(model: Path, root: Path, limit: int = 8192, keep: int = 2) -> WeightFolder:
    lm = load_causal_lm(model)
    packer = Packer(dict(unique_tensors(lm)), "float32", limit, keep=True)
    return WeightFolder(root, lm, packer, keep, write=True)


@pytest.mark.parametrize("limit", [8192, 1 << 30], ids=["several files", "one file"])
def test_a_version_is_a_folder_that_transformers_loads(model: Path, tmp_path: Path, limit: int) -> None:
    folder = folder_of(model, tmp_path, limit)
    sums = list(folder.write(7))
    assert len(sums) == (1 if limit > 8192 else len(sums)) >= 1
    read = AutoModelForCausalLM.from_pretrained(folder.path(7), dtype=torch.float32)
    for (name, a), (_, b) in zip(reference(model).named_parameters(), read.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_write_that_breaks_off_leaves_nothing(model: Path, tmp_path: Path, monkeypatch) -> None:
    folder = folder_of(model, tmp_path)
    assert list(folder.write(1))
    (tmp_path / ".version-00000002.1").mkdir()  # of a trainer that was killed
    calls = iter(range(3))

    def full(*args: object, **kw: object) -> None:
        if next(calls) == 2:
            raise OSError(28, "No space left on device")
        original(*args, **kw)  # type: ignore[arg-type]

    original = weight_folder.save_file
    monkeypatch.setattr(weight_folder, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        list(folder.write(2))
    assert [p.name for p in tmp_path.iterdir()] == [folder.path(1).name]


def test_the_last_versions_are_kept_and_those_being_read(model: Path, tmp_path: Path) -> None:
    folder = folder_of(model, tmp_path)
    for version in range(1, 5):
        list(folder.write(version))
    with (folder.path(1) / LOCK_FILE).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        folder.prune(4)
        assert [folder.path(v).exists() for v in range(1, 5)] == [True, False, True, True]
    folder.prune(4)
    assert [folder.path(v).exists() for v in range(1, 5)] == [False, False, True, True]


def test_a_run_that_goes_on_from_an_earlier_version_keeps_what_it_pushed(model: Path, tmp_path: Path) -> None:
    """The run before it was killed at version 17."""
    folder = folder_of(model, tmp_path)
    for version in (16, 17, 10):
        list(folder.write(version))
    folder.prune(10)
    assert [folder.path(v).exists() for v in (10, 16, 17)] == [True, False, False]


def test_the_engine_holds_what_the_trainer_holds(model: Path, tmp_path: Path) -> None:
    config = WeightsConfig(transport="disk", folder=str(tmp_path / "w"), **QUICK)  # type: ignore[arg-type]
    with MiniGateway(model) as gateway, join_ranks(get_platform("cpu")) as ranks:
        lm = load_causal_lm(model)
        shard(lm, ranks.mesh)
        client = TrainerClient(gateway.url, gateway.KEY)
        sender = WeightsSender(lm, client, ranks, get_platform("cpu"), config, "float32")
        for version in (1, 2, 3):
            shift(lm, 0.125)
            assert sender.push(version).version == version
        gateway.fail_commits = 1
        shift(lm, 0.125)
        assert sender.push(4).attempts == 2
        gateway.fail_commits = 99
        with pytest.raises(WeightUpdateError, match="the test broke it"):
            sender.push(5)
        sender.close()
    for (name, old), (_, new) in zip(
        reference(model).named_parameters(), gateway.models[4].named_parameters(), strict=True
    ):
        assert torch.allclose(old + 0.5, new, atol=1e-6), name
    assert sorted(p.name for p in (tmp_path / "w").iterdir()) == [f"version-{v:08d}" for v in (3, 4, 5)], (
        "an update that failed removes nothing"
    )
