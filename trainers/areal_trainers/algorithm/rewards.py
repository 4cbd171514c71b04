"""Rewards of sessions, shaped before they are compared.

Invariant: a missing reward (None) stays missing and enters no mean; it is not 0. In numbers:

    overlong, length 100, buffer 20, penalty 1    80 tokens -> -0, 90 -> -0.5, 100 and more -> -1
    batch normalisation of 1, 0, missing          -> 1, -1, missing
    equal rewards                                 -> 0, 0: nothing to compare
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

Rewards = Mapping[str, float | None]

EPSILON = 1e-6
"""Keeps equal values from dividing by zero; invisible beside any real deviation."""


def equal_groups(rewards: Rewards, groups: Mapping[str, str]) -> set[str]:
    """Groups whose known rewards are all equal: singletons and groups without any reward too.

    They have no advantage to give. DAPO (arXiv:2503.14476, eq. 11) leaves them out and samples others in
    their place.
    """
    known: dict[str, set[float]] = {g: set() for g in groups.values()}
    for session, reward in rewards.items():
        if reward is not None:
            known[groups[session]].add(reward)
    return {g for g, values in known.items() if len(values) < 2}


def penalise_length(
    rewards: Rewards, lengths: Mapping[str, int], *, length: int, buffer: int, penalty: float
) -> dict[str, float | None]:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13), times `penalty`.

    lengths: session -> sampled tokens. From `length - buffer` tokens on the reward falls linearly, by
    `penalty` at `length` and not further.
    """

    def excess(session: str) -> float:
        return min(1.0, max(0.0, (lengths.get(session, 0) - (length - buffer)) / buffer))

    return {s: None if r is None else r - penalty * excess(s) for s, r in rewards.items()}


def normalise(rewards: Rewards) -> dict[str, float | None]:
    """Centred and divided by the deviation (population) of all known rewards."""
    known = np.array([r for r in rewards.values() if r is not None], np.float64)
    if not len(known):
        return dict(rewards)
    values = iter(standardise(known).tolist())
    return {s: None if r is None else next(values) for s, r in rewards.items()}


def standardise(values: np.ndarray) -> np.ndarray:
    """[n] -> (values - mean) / (deviation + ε); exactly 0 where all are equal."""
    if not len(values) or values.min() == values.max():
        return np.zeros_like(values)
    return (values - values.mean()) / (values.std() + EPSILON)


def by_group(rewards: Rewards, groups: Mapping[str, str]) -> dict[str, list[str]]:
    """group -> its sessions that have a reward."""
    members: dict[str, list[str]] = defaultdict(list)
    for session, reward in rewards.items():
        if reward is not None:
            members[groups[session]].append(session)
    return members
