"""Advantages without a critic: a session's reward against those of other sessions.

    grpo          A_i = (r_i - mean(r)) / (std(r) + ε)         DeepSeekMath, arXiv:2402.03300, §4.1.2
                  without the deviation                        Dr. GRPO, arXiv:2503.20783
    rloo          A_i = r_i - mean_{j≠i}(r_j)                  arXiv:2402.14740
    reinforce_pp  A_t = r_i - Σ_{k≥t} KL_k, then centred and divided by the deviation over all tokens of the
                  batch                                        arXiv:2501.03262

Mean and deviation (of the population, ÷ n) are over the group's SESSIONS that have a reward, however many
of them there are and however often they branched. In numbers, grpo / rloo without deviation:

    rewards 1, 0, 0, 0             ->  1.732, -0.577 x3 / 1, -0.333 x3
    rewards 1, 0, missing          ->  1, -1, none      / 1, -1, none      missing is left out, it is not 0
    rewards 1, 1, 1                ->  0, 0, 0          / 0, 0, 0          nothing to compare
    rewards 1, missing, missing    ->  0, none, none    / 0, none, none    nothing to be compared with
    1 with three branches, 0       ->  1 (on each branch), -1 / the same   a session that branched counts once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from areal_trainers.algorithm.rewards import EPSILON, Rewards, by_group, standardise


def group_advantages(
    rewards: Rewards, groups: Mapping[str, str], *, deviation: bool = True, leave_one_out: bool = False
) -> dict[str, float]:
    """session -> advantage, for the sessions that have a reward.

    Args:
        rewards: session -> reward; None is missing.
        groups: session -> group.
        deviation: divide by the group's deviation.
        leave_one_out: compare with the mean of the others (rloo) rather than of all.
    """
    out: dict[str, float] = {}
    for sessions in by_group(rewards, groups).values():
        r = np.array([rewards[s] for s in sessions], np.float64)
        if r.min() == r.max():  # exactly zero, where rounding of the mean would leave a residue / ε
            out.update(dict.fromkeys(sessions, 0.0))
            continue
        centred = r - r.mean()
        if leave_one_out:  # r_i - (n mean - r_i) / (n - 1)
            centred *= len(r) / (len(r) - 1)
        values = centred / (r.std() + EPSILON) if deviation else centred
        out.update(zip(sessions, values.tolist(), strict=True))
    return out


def returns_to_go(reward: float, penalties: np.ndarray) -> np.ndarray:
    """[n] reward of the end minus the penalties [n] from each token on (discount 1)."""
    return reward - np.cumsum(penalties[::-1])[::-1]


def whiten(columns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Columns of several sequences, centred and divided by the deviation of all their tokens."""
    if not columns:
        return []
    flat = standardise(np.concatenate(columns))
    return np.split(flat, np.cumsum([len(c) for c in columns])[:-1])
