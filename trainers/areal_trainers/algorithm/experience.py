"""A batch's items with every column the update reads, all of them fixed before its first optimiser step.

Invariant: columns are made over the WHOLE batch (means, deviations, masks, shares), here and nowhere else;
whatever cuts the batch afterwards only carries them along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from areal_agent.config import AlgorithmConfig
from areal_trainers.algorithm.advantages import group_advantages, returns_to_go, whiten
from areal_trainers.algorithm.averaging import weights_and_shares
from areal_trainers.algorithm.correction import second_moment_mask
from areal_trainers.algorithm.gae import Estimate, gae, turns_of
from areal_trainers.algorithm.kl import kl_estimate
from areal_trainers.algorithm.rewards import Rewards, normalise, penalise_length
from areal_trainers.packing import Item

if TYPE_CHECKING:
    from areal_trainers.batch import TrainBatch

Columns = Sequence[np.ndarray]


@dataclass(frozen=True)
class Experience:
    """items: columns as `complete` says; metrics: numbers of the advantages and the critic."""

    items: tuple[Item, ...]
    metrics: dict[str, float]


def complete(
    work: TrainBatch,
    algorithm: AlgorithmConfig,
    *,
    proximal: Columns | None = None,
    reference: Columns | None = None,
    values: Columns | None = None,
) -> Experience:
    """Add `advantage`, `weight`, `share` and what the chosen parts need: `proximal` or `alpha`, `reference`,
    `keep`, and for the critic `value`, `return`, `value_count`.

    Args:
        proximal: per item [n] logprobs under the weights held; None where `algorithm.proximal` needs none.
        reference: per item [n] logprobs under the frozen reference; None without one.
        values: per item [n] the critic's values; None without one.
    """
    items = work.items
    behaviour = [i.columns["behaviour"] for i in items]
    extra: list[dict[str, np.ndarray]] = [{} for _ in items]
    if algorithm.proximal == "recompute":
        assert proximal is not None
        _put(extra, "proximal", proximal)
    elif algorithm.proximal == "reuse":
        _put(extra, "proximal", behaviour)
    else:
        ages = [work.version - i.columns["version"] for i in items]
        _put(extra, "alpha", [age / (age + 1) for age in ages])
    if reference is not None:
        _put(extra, "reference", reference)
    if algorithm.correction == "second_moment" and items:
        assert proximal is not None
        log_weights = [p - b for p, b in zip(proximal, behaviour, strict=True)]
        mask = second_moment_mask(np.concatenate(log_weights), algorithm.second_moment_bound)
        _put(extra, "keep", np.split(mask.astype(np.float64), _cuts(items)))
    sessions = [work.session(i) for i in range(len(items))]
    shares = weights_and_shares(
        algorithm.averaging, [i.predicted for i in items], sessions, algorithm.loss_constant
    )
    _put(extra, "weight", [w for w, _ in shares])
    _put(extra, "share", [s for _, s in shares])

    penalties = [np.zeros(i.predicted) for i in items]
    metrics: dict[str, float] = {}
    if algorithm.kl == "reward":
        assert reference is not None
        now = proximal if proximal is not None else behaviour
        gaps = [torch.from_numpy(np.asarray(p - r)) for p, r in zip(now, reference, strict=True)]
        kls = [kl_estimate(algorithm.kl_estimator, gap).numpy() for gap in gaps]
        penalties = [algorithm.kl_coefficient * kl for kl in kls]
        metrics["kl_reward"] = _mean(kls)
    rewards = shaped(work, algorithm)
    advantages, estimates = _advantages(algorithm, work, sessions, rewards, penalties, values)
    _put(extra, "advantage", advantages)
    if estimates is not None and values is not None:
        _put(extra, "value", values)
        _put(extra, "return", [e.returns for e in estimates])
        _put(extra, "value_count", [e.counts for e in estimates])
        metrics |= _value_metrics(estimates, values)
    metrics["advantage_abs_mean"] = _mean([np.abs(a) for a in advantages])
    done = tuple(replace(i, columns={**i.columns, **more}) for i, more in zip(items, extra, strict=True))
    return Experience(done, metrics)


def shaped(work: TrainBatch, algorithm: AlgorithmConfig) -> Rewards:
    """session -> reward after the length penalty and the normalisation; None stays None."""
    rewards: Rewards = work.rewards
    if algorithm.overlong_penalty:
        rewards = penalise_length(
            rewards,
            work.session_tokens,
            length=algorithm.overlong_length,
            buffer=algorithm.overlong_buffer,
            penalty=algorithm.overlong_penalty,
        )
    return normalise(rewards) if algorithm.reward_normalisation == "batch" else rewards


def _advantages(
    algorithm: AlgorithmConfig,
    work: TrainBatch,
    sessions: Sequence[str],
    rewards: Rewards,
    penalties: Columns,
    values: Columns | None,
) -> tuple[list[np.ndarray], list[Estimate] | None]:
    ends = [rewards[s] for s in sessions]
    if algorithm.advantage in ("grpo", "rloo"):
        per_session = group_advantages(
            _less(rewards, sessions, penalties),
            work.groups,
            deviation=algorithm.advantage_std,
            leave_one_out=algorithm.advantage == "rloo",
        )
        return [np.full(i.predicted, per_session[s]) for i, s in zip(work.items, sessions, strict=True)], None
    estimates = None
    if algorithm.needs_critic:
        assert values is not None
        turns = algorithm.advantage == "gae_turn"
        estimates = [
            gae(
                _known(end),
                penalty,
                value,
                gamma=algorithm.gamma,
                lambda_=algorithm.gae_lambda,
                turns=turns_of(item.loss_mask) if turns else None,
            )
            for end, penalty, value, item in zip(ends, penalties, values, work.items, strict=True)
        ]
        columns = [e.advantages for e in estimates]
    else:
        columns = [returns_to_go(_known(end), p) for end, p in zip(ends, penalties, strict=True)]
    return (whiten(columns) if algorithm.advantage_std else columns), estimates


def _less(rewards: Rewards, sessions: Sequence[str], penalties: Columns) -> Rewards:
    """Rewards minus the penalties of all of the session's trained tokens."""
    out = dict(rewards)
    for session, penalty in zip(sessions, penalties, strict=True):
        out[session] = _known(out[session]) - float(penalty.sum())
    return out


def _known(reward: float | None) -> float:
    assert reward is not None, "a session without a reward has no item"
    return reward


def _put(extra: Sequence[dict[str, np.ndarray]], name: str, columns: Columns) -> None:
    for columns_of_item, column in zip(extra, columns, strict=True):
        columns_of_item[name] = column


def _cuts(items: Sequence[Item]) -> np.ndarray:
    return np.cumsum([i.predicted for i in items])[:-1]


def _mean(columns: Columns) -> float:
    return float(np.concatenate(columns).mean()) if columns else 0.0


def _value_metrics(estimates: Sequence[Estimate], values: Columns) -> Mapping[str, float]:
    """Explained variance: 1 - Var(return - value) / Var(return); 0 where returns do not vary."""
    if not estimates:
        return {"value_mean": 0.0, "return_mean": 0.0, "explained_variance": 0.0}
    counts = np.concatenate([e.counts for e in estimates]) > 0
    returns = np.concatenate([e.returns for e in estimates])[counts]
    predicted = np.concatenate(values)[counts]
    spread = float(returns.var())
    return {
        "value_mean": float(predicted.mean()),
        "return_mean": float(returns.mean()),
        "explained_variance": 1.0 - float((returns - predicted).var()) / spread if spread else 0.0,
    }
