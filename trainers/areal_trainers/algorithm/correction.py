"""The behaviour weight w = π_prox/π_behave: what makes stale samples count as if they were fresh.

    none           w = 1
    truncate       w, brought into [floor, cap]                     AReaL (arXiv:2505.24298, eq. 5)
    mask           w, and 0 outside [floor, cap]
    second_moment  w, and 0 for the tokens of largest (log w)²      M2PO (arXiv:2510.01161, algorithm 1)

At level `sequence` w is the product over the sequence's trained tokens. The weight carries no gradient.
"""

from __future__ import annotations

import numpy as np
import torch

from areal_agent.config import AlgorithmConfig


def behaviour_weight(
    algorithm: AlgorithmConfig, log_weight: torch.Tensor, keep: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """([N] weight or None for 1, [N] bool tokens whose weight a bound or mask changed).

    Args:
        log_weight: [N] without gradient, at the level it is meant for.
        keep: [N] 1.0 for tokens `second_moment_mask` keeps; needed by that correction only.
    """
    kind = algorithm.correction or "none"
    if kind == "none":
        return None, torch.zeros_like(log_weight, dtype=torch.bool)
    raw = log_weight.exp()
    if kind == "second_moment":
        assert keep is not None
        return torch.where(keep > 0, raw, 0.0), keep == 0
    low, high = algorithm.behaviour_weight_floor, algorithm.behaviour_weight_cap
    outside = (raw < low) | (raw > high)
    weight = raw.clamp(low, high) if kind == "truncate" else torch.where(outside, 0.0, raw)
    return weight, outside


def second_moment_mask(log_weight: np.ndarray, bound: float) -> np.ndarray:
    """[N] log π_prox/π_behave of the whole batch -> [N] bool, tokens kept.

    The fewest tokens of largest (log w)² go, such that the mean over the rest is at most `bound`; one
    token always stays.
    """
    if not len(log_weight):
        return np.zeros(0, bool)
    order = np.argsort(log_weight**2, kind="stable")
    means = np.cumsum(log_weight[order] ** 2) / np.arange(1, len(order) + 1)
    kept = max(1, int(np.count_nonzero(means <= bound)))  # the running mean of a rising series rises
    mask = np.zeros(len(order), bool)
    mask[order[:kept]] = True
    return mask
