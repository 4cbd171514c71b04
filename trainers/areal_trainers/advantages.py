"""GRPO advantages: a session's reward against the other sessions of its group.

    A_i = (r_i - mean(r)) / (std(r) + ε)          DeepSeekMath (arXiv:2402.03300), §4.1.2

Mean and deviation (of the population, ÷ n) are over the group's SESSIONS that have a reward. In numbers:

    rewards 1, 0, 0, 0             ->  1.732, -0.577, -0.577, -0.577
    rewards 1, 0, missing          ->  1, -1, none        missing is left out, it is not 0
    rewards 1, 1, 1                ->  0, 0, 0            nothing to compare
    rewards 1, missing, missing    ->  0, none, none      a singleton has nothing to be compared with
    1 with three branches, 0       ->  1 (on each branch), -1     a session that branched counts once
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

EPSILON = 1e-6
"""Keeps equal rewards from dividing by zero; invisible beside any real deviation of rewards."""


def group_advantages(
    rewards: Mapping[str, float | None], groups: Mapping[str, str], *, normalise: bool = True
) -> dict[str, float]:
    """session -> advantage, for the sessions that have a reward.

    Args:
        rewards: session -> reward; None is missing.
        groups: session -> group.
        normalise: divide by the group's deviation; False only centres (Dr. GRPO, arXiv:2503.20783).
    """
    members: dict[str, list[str]] = defaultdict(list)
    for session, reward in rewards.items():
        if reward is not None:
            members[groups[session]].append(session)
    out: dict[str, float] = {}
    for sessions in members.values():
        r = np.array([rewards[s] for s in sessions], np.float64)
        if r.min() == r.max():  # exactly zero, where rounding of the mean would leave a residue / ε
            out.update(dict.fromkeys(sessions, 0.0))
            continue
        centred = r - r.mean()
        values = centred / (r.std() + EPSILON) if normalise else centred
        out.update(zip(sessions, values.tolist(), strict=True))
    return out
