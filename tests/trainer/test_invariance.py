"""Splitting is invisible: budget, order, ranks, sequence parallelism, recomputing: one float64 gradient.

The other side of each comparison is one micro-batch on one rank in which no beginning is shared.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from invariance_rank import CASES, SPLITS, gradient, recipe
from trainer_kit import make_model

from areal_agent.config import AlgorithmConfig
from areal_agent.recipes import RECIPES, RecipeName
from areal_trainers.platform import get_platform
from areal_trainers.ranks import Ranks, join_ranks

HERE = Path(__file__).parent
TOLERANCE = 1e-9
"""Of the largest gradient entry."""


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with join_ranks(get_platform("cpu")) as joined:
        yield joined


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def whole_batch(
    ranks: Ranks, model: Path, algorithm: AlgorithmConfig | None = None, *, lora: bool = False
) -> tuple[float, dict[str, np.ndarray], np.ndarray, float]:
    return gradient(ranks, model, 10**6, algorithm, lora=lora, share_prefixes=False)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerance: float = TOLERANCE) -> None:
    assert a.keys() == b.keys()
    scale = max(np.abs(g).max() for g in a.values())
    assert scale > 0
    for name in a:
        np.testing.assert_allclose(a[name] / scale, b[name] / scale, atol=tolerance, rtol=0, err_msg=name)


@pytest.mark.parametrize("budget", [1, 40, 100])
def test_micro_batch_budget(ranks: Ranks, model: Path, budget: int) -> None:
    whole = whole_batch(ranks, model)
    cut = gradient(ranks, model, budget)
    assert cut[0] == pytest.approx(whole[0], abs=1e-9)
    np.testing.assert_allclose(cut[2], whole[2], atol=1e-9)
    assert cut[3] == pytest.approx(whole[3], abs=1e-9)
    same(whole[1], cut[1])
    assert whole[2][1] > 0  # the clip acted, and
    assert whole[2][3] > 0  # the truncation


@pytest.mark.parametrize("name", RECIPES)
def test_cut_and_order_do_not_show_in_any_recipe(ranks: Ranks, model: Path, name: RecipeName) -> None:
    whole = whole_batch(ranks, model, recipe(name))
    cut = gradient(ranks, model, 50, recipe(name), order=1)
    assert cut[0] == pytest.approx(whole[0], abs=1e-9)
    np.testing.assert_allclose(cut[2], whole[2], atol=1e-9)
    same(whole[1], cut[1])


@pytest.mark.parametrize("averaging", ["sequence", "session", "constant"])
def test_cut_does_not_show_in_an_average_with_kl_and_entropy(
    ranks: Ranks, model: Path, averaging: str
) -> None:
    """Sessions are cut over micro-batches here, sequences never are."""
    algorithm = AlgorithmConfig.model_validate(
        {"averaging": averaging, "kl": "loss", "entropy_coefficient": 0.1, "correction_level": "sequence"}
    )
    whole = whole_batch(ranks, model, algorithm)
    cut = gradient(ranks, model, 30, algorithm)
    assert cut[0] == pytest.approx(whole[0], abs=1e-9)
    same(whole[1], cut[1])


@pytest.mark.parametrize("name", RECIPES)
def test_what_sequences_begin_with_computed_once(ranks: Ranks, model: Path, name: RecipeName) -> None:
    whole = whole_batch(ranks, model, recipe(name))
    once = gradient(ranks, model, 10**6, recipe(name))
    assert once[0] == pytest.approx(whole[0], abs=1e-9)
    assert once[3] == pytest.approx(whole[3], abs=1e-9)
    np.testing.assert_allclose(once[2], whole[2], atol=1e-9)
    same(whole[1], once[1])
    assert any(not np.array_equal(whole[1][n], once[1][n]) for n in whole[1])  # another order of sums


def test_another_batch_has_another_gradient(ranks: Ranks, model: Path) -> None:
    """The comparisons above can fail."""
    with pytest.raises(AssertionError):
        same(gradient(ranks, model, 100)[1], gradient(ranks, model, 100, seed=1)[1])


def test_activation_checkpointing(ranks: Ranks, model: Path) -> None:
    for name in RECIPES:
        a = gradient(ranks, model, 100, recipe(name))
        b = gradient(ranks, model, 100, recipe(name), activation_checkpointing=True)
        assert b[0] == a[0]
        same(a[1], b[1])


def test_an_adapter_s_gradient(ranks: Ranks, model: Path) -> None:
    whole = whole_batch(ranks, model, lora=True)
    assert all(".lora_" in name for name in whole[1])
    for order, again in ((1, False), (None, True)):
        cut = gradient(ranks, model, 40, lora=True, order=order, activation_checkpointing=again)
        assert cut[0] == pytest.approx(whole[0], abs=1e-9)
        same(whole[1], cut[1])


@pytest.fixture(scope="module")
def by_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(model, folder with the results of each recipe under each split)."""
    model, out = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("out")
    make_model(model)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(HERE / "invariance_rank.py"), str(model), str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return model, out


@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks(ranks: Ranks, by_two_ranks: tuple[Path, Path], split: str) -> None:
    """Every recipe, and one with LoRA: 2 ranks at a budget of 64 tokens against one micro-batch on one rank."""
    model, out = by_two_ranks
    for name, lora in CASES:
        other = dict(np.load(out / f"{split}, {name}{', lora' * lora}.npz"))
        loss, grads, stats, entropy = whole_batch(ranks, model, recipe(name), lora=lora)
        assert float(other.pop("loss")) == pytest.approx(loss, abs=1e-9)
        assert float(other.pop("entropy")) == pytest.approx(entropy, abs=1e-9)
        np.testing.assert_allclose(other.pop("stats"), stats, atol=1e-9)
        same(grads, other)
