"""Generalised advantage estimation (arXiv:1506.02438, eq. 16) over tokens, or over turns.

    δ_k = r_k + γ V_{k+1} - V_k        A_k = δ_k + γλ A_{k+1}        return_k = A_k + V_k

An action k is a sampled token, or a turn: a run of sampled tokens with nothing in between, which is one
reply. Tokens that were not sampled (prompts, tool results) are no actions, and neither discount nor carry
value. Nothing follows a sequence's last action, where the session's reward arrives; of a session that
branched, at the end of each branch. In numbers, γ = 1, λ = 0.5, reward 1 at the end:

    values 0.2, 0.4, 0.8 of three tokens        δ = 0.2, 0.4, 0.2        A = 0.45, 0.5, 0.2
    the same, tokens 1-2 one turn, 3 another    δ = 0.6, 0.2 (V of a turn: 0.2, 0.8)    A = 0.7, 0.7, 0.2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """Of one sequence's n trained tokens.

    Attributes:
        advantages: [n].
        returns: [n], what the critic is fitted to.
        counts: [n] 1.0 where the critic is fitted, else 0.0: at the first token of a turn only.
    """

    advantages: np.ndarray
    returns: np.ndarray
    counts: np.ndarray


def gae(
    reward: float,
    penalties: np.ndarray,
    values: np.ndarray,
    *,
    gamma: float,
    lambda_: float,
    turns: np.ndarray | None = None,
) -> Estimate:
    """One sequence.

    Args:
        reward: at its end.
        penalties: [n], taken off the reward of each token (KL in the reward).
        values: [n] of the state before each token.
        turns: [n] int, rising by one at each new turn, for the turn-level estimate; None: token-level.
    """
    n = len(values)
    starts = np.arange(n) if turns is None else np.flatnonzero(np.diff(turns, prepend=-1))
    r = -np.add.reduceat(penalties.astype(np.float64), starts)
    r[-1] += reward
    v = values[starts].astype(np.float64)
    deltas = r + gamma * np.append(v[1:], 0.0) - v
    advantages, running = np.zeros(len(v)), 0.0
    for k in reversed(range(len(v))):
        running = deltas[k] + gamma * lambda_ * running
        advantages[k] = running
    spread = np.repeat(np.arange(len(v)), np.diff(np.append(starts, n)))
    counts = np.zeros(n)
    counts[starts] = 1.0
    return Estimate(advantages[spread], (advantages + v)[spread], counts)


def turns_of(loss_mask: np.ndarray) -> np.ndarray:
    """[L] bool -> [n] number of the turn that each trained token belongs to."""
    begins = loss_mask & ~np.concatenate([[False], loss_mask[:-1]])
    return np.cumsum(begins)[loss_mask] - 1
