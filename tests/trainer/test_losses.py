"""The decoupled PPO loss against an independent float64 oracle, formula and gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_trainers.losses import STAT_NAMES, ppo_sum

LOW, HIGH, CAP = 0.2, 0.28, 2.0


def oracle(
    logp: np.ndarray, prox: np.ndarray, behave: np.ndarray, adv: np.ndarray
) -> tuple[float, np.ndarray]:
    """Token by token, the gradient by cases rather than by differentiation."""
    loss, grad = 0.0, np.zeros(len(logp))
    for t in range(len(logp)):
        u = np.exp(logp[t] - prox[t])
        w = min(np.exp(prox[t] - behave[t]), CAP)
        clipped = min(max(u, 1 - LOW), 1 + HIGH)
        if u * adv[t] <= clipped * adv[t]:
            loss -= w * u * adv[t]
            grad[t] = -w * u * adv[t]  # du/dlogp = u
        else:
            loss -= w * clipped * adv[t]
    return loss, grad


def run(logp: np.ndarray, prox: np.ndarray, behave: np.ndarray, adv: np.ndarray):
    x = torch.tensor(logp, requires_grad=True)
    sums = ppo_sum(x, *map(torch.tensor, (prox, behave, adv)), clip_low=LOW, clip_high=HIGH, weight_cap=CAP)
    sums.loss.backward()
    return sums, x.grad.numpy()  # type: ignore[union-attr]


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
def test_loss_and_gradient_agree_with_the_oracle(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    logp = -rng.exponential(1.0, n)
    prox = logp + rng.normal(0, 0.4, n)
    behave = prox + rng.normal(0, 0.8, n)
    adv = rng.normal(0, 1, n) * rng.integers(0, 2, n)
    sums, grad = run(logp, prox, behave, adv)
    loss, wanted = oracle(logp, prox, behave, adv)
    assert sums.loss.item() == pytest.approx(loss, abs=1e-10, rel=1e-10)
    np.testing.assert_allclose(grad, wanted, atol=1e-10, rtol=1e-10)


def test_on_policy_the_gradient_is_the_advantage() -> None:
    logp, adv = np.log([0.5, 0.25]), np.array([1.0, -2.0])
    assert run(logp, logp, logp, adv)[1].tolist() == pytest.approx([-1.0, 2.0])


def test_the_clip_is_around_the_proximal_policy_not_the_behaviour() -> None:
    logp = np.array([-1.0])
    sums, grad = run(logp, logp, logp - 0.6, np.array([1.0]))  # far from behaviour, equal to proximal
    assert dict(zip(STAT_NAMES, sums.stats.tolist(), strict=True))["clipped"] == 0
    assert grad[0] == pytest.approx(-np.exp(0.6))


def test_the_behaviour_weight_is_truncated_and_counted() -> None:
    logp = np.array([-1.0, -1.0])
    sums, grad = run(logp, logp, logp - np.array([3.0, 0.0]), np.array([1.0, 1.0]))
    stats = dict(zip(STAT_NAMES, sums.stats.tolist(), strict=True))
    assert grad.tolist() == pytest.approx([-CAP, -1.0])
    assert stats["truncated"] == 1
    assert stats["weight"] == pytest.approx(CAP + 1)
    assert sums.weight_max == pytest.approx(np.exp(3.0))


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "clipped"),
    [(0.3, 1.0, True), (0.3, -1.0, False), (-0.3, -1.0, True), (-0.3, 1.0, False), (0.22, 1.0, False)],
)
def test_only_a_move_that_already_went_far_enough_is_clipped(
    log_ratio: float, advantage: float, clipped: bool
) -> None:
    prox = np.array([-2.0])
    sums, grad = run(prox + log_ratio, prox, prox, np.array([advantage]))
    assert bool(sums.stats[STAT_NAMES.index("clipped")]) is clipped
    assert bool(grad[0] == 0.0) is clipped


def test_no_tokens_no_loss() -> None:
    sums, _ = run(*[np.zeros(0)] * 4)
    assert sums.loss.item() == 0.0
    assert sums.weight_max == 0.0
