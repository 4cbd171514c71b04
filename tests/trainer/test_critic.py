"""GAE by hand, the critic's loss, and a critic that learns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from invariance_rank import VERSION, fixed_batch
from trainer_kit import make_model

from areal_agent.config import AlgorithmConfig, RunConfig
from areal_trainers.algorithm.critic import value_loss
from areal_trainers.algorithm.experience import complete
from areal_trainers.algorithm.gae import gae, turns_of
from areal_trainers.algorithm.models import load_companions
from areal_trainers.batch import prepare
from areal_trainers.clock import Clock
from areal_trainers.learner import Learner
from areal_trainers.model import load_causal_lm, shard
from areal_trainers.optim import Optimizer
from areal_trainers.platform import get_platform
from areal_trainers.ranks import Ranks, join_ranks

NO_PENALTY = np.zeros(3)
VALUES = np.array([0.2, 0.4, 0.8])


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with join_ranks(get_platform("cpu")) as joined:
        yield joined


def test_token_level_by_hand() -> None:
    got = gae(1.0, NO_PENALTY, VALUES, gamma=1.0, lambda_=0.5)
    assert got.advantages.tolist() == pytest.approx([0.45, 0.5, 0.2])
    assert got.returns.tolist() == pytest.approx([0.65, 0.9, 1.0])
    assert got.counts.tolist() == [1, 1, 1]


def test_turn_level_by_hand() -> None:
    got = gae(1.0, NO_PENALTY, VALUES, gamma=1.0, lambda_=0.5, turns=np.array([0, 0, 1]))
    assert got.advantages.tolist() == pytest.approx([0.7, 0.7, 0.2])
    assert got.returns.tolist() == pytest.approx([0.9, 0.9, 1.0])
    assert got.counts.tolist() == [1, 0, 1]


def test_a_penalty_is_taken_off_where_it_arises() -> None:
    got = gae(1.0, np.array([0.0, 0.3, 0.0]), np.zeros(3), gamma=0.5, lambda_=1.0)
    assert got.advantages.tolist() == pytest.approx([0.25 - 0.15, 0.5 - 0.3, 1.0])


@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_with_lambda_1_the_return_is_the_discounted_reward(seed: int, n: int) -> None:
    """Whatever the critic says: λ = 1 is Monte Carlo, and the values cancel."""
    rng = np.random.default_rng(seed)
    got = gae(2.0, np.zeros(n), rng.normal(size=n), gamma=0.9, lambda_=1.0)
    assert got.returns == pytest.approx(2.0 * 0.9 ** np.arange(n - 1, -1, -1))


def test_a_turn_is_a_run_of_trained_tokens() -> None:
    mask = np.array([False, True, True, False, False, True, False, True])
    assert turns_of(mask).tolist() == [0, 0, 1, 2]


def test_the_value_loss_is_the_worse_of_moved_and_clipped() -> None:
    values = torch.tensor([0.5, 0.1, 9.0], dtype=torch.float64, requires_grad=True)
    columns = {
        "value": torch.tensor([0.0, 0.0, 0.0]),
        "return": torch.tensor([1.0, 1.0, 1.0]),
        "value_count": torch.tensor([1.0, 1.0, 0.0]),
    }
    loss, clipped = value_loss(AlgorithmConfig(value_clip=0.2, value_coefficient=1.0), values, columns)
    loss.backward()
    # 0.5 is held at 0.2, where no gradient is; 0.1 is within; the third is no first token of a turn.
    assert float(loss.detach()) == pytest.approx(0.5 * (0.8**2 + 0.9**2), rel=1e-6)
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -0.9, 0.0])
    assert float(clipped) == 1.0


def config_of(model: Path, **algorithm: object) -> RunConfig:
    return RunConfig.parse(
        {
            "model": str(model),
            "algorithm": {"recipe": "ppo", "correction": "none", "critic_learning_rate": 1e-2} | algorithm,
            "trainer": {"learning_rate": 1e-2, "microbatch_tokens": 64},
        }
    )


def learner_of(config: RunConfig, ranks: Ranks) -> Learner:
    torch.manual_seed(0)
    policy = shard(load_causal_lm(config.model), ranks.mesh)
    optimizer = Optimizer(policy.parameters(), learning_rate=config.trainer.learning_rate)
    companions = load_companions(config, ranks, get_platform("cpu"))
    return Learner(policy, optimizer, ranks, config.trainer, Clock(), config.algorithm, companions)


def test_ppo_fits_values_and_explains_returns(ranks: Ranks, tmp_path: Path) -> None:
    """On one batch over and over: the first advantages are the rewards, the value loss falls."""
    config = config_of(make_model(tmp_path / "model"), gae_lambda=1.0, value_clip=None)
    learner = learner_of(config, ranks)
    work = prepare(fixed_batch(), version=VERSION, max_staleness=9)
    assert work.items
    losses, explained = [], []
    for step in range(12):
        proximal, _ = learner.logprobs(work.items)
        behaviour = [
            replace(i, columns={**i.columns, "behaviour": p})
            for i, p in zip(work.items, proximal, strict=True)
        ]
        experience = learner.experience(replace(work, items=tuple(behaviour)), proximal)
        if step == 0:
            returns = np.concatenate([i.columns["return"] for i in experience.items])
            rewards = np.repeat(
                [work.rewards[work.session(k)] for k in range(len(work.items))],  # type: ignore[arg-type]
                [i.predicted for i in work.items],
            )
            assert returns == pytest.approx(rewards)
            assert experience.metrics["value_mean"] == 0.0
        update = learner.update(experience.items, seed=step)
        losses.append(update.metrics["value_loss"])
        explained.append(experience.metrics["explained_variance"])
    assert losses[-1] < 0.2 * losses[0]
    assert explained[-1] > 0.5 > explained[0]


def test_a_reference_is_frozen_while_the_policy_moves(ranks: Ranks, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    learner = learner_of(config_of(model, recipe="grpo"), ranks)
    work = prepare(fixed_batch(), version=VERSION, max_staleness=9)
    assert learner.companions.critic is None
    divergence = []
    for step in range(3):
        proximal, _ = learner.proximal(work.items)
        assert proximal is not None
        experience = learner.experience(work, proximal)
        reference = [i.columns["reference"] for i in experience.items]
        if step == 0:
            first = reference
            assert np.array_equal(np.concatenate(reference), np.concatenate(proximal))
        assert np.array_equal(np.concatenate(reference), np.concatenate(first))
        divergence.append(learner.update(experience.items, seed=step).metrics["kl_reference"])
    assert divergence[0] == pytest.approx(0.0, abs=1e-6)
    assert divergence[1] > 1e-4


def test_only_what_the_algorithm_needs_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    for recipe, reference, critic in [("dapo", False, False), ("rloo", True, False), ("ppo", False, True)]:
        found = load_companions(config_of(model, recipe=recipe), ranks, get_platform("cpu"))
        assert (found.reference is not None, found.critic is not None) == (reference, critic)


def test_complete_leaves_the_leased_items_alone() -> None:
    work = prepare(fixed_batch(), version=VERSION, max_staleness=9)
    complete(work, AlgorithmConfig(), proximal=[np.zeros(i.predicted) for i in work.items])
    assert set(work.items[0].columns) == {"behaviour", "version"}
