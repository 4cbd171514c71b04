"""Estimators of the divergence from the reference, from one sampled token (Schulman, "Approximating KL
divergence", 2020). With x = log π - log π_ref:

    k1 = x                    unbiased; in a loss its gradient has mean 0, it belongs in the reward
    k2 = x² / 2               low variance; its gradient in a loss is that of KL(π ‖ π_ref), on-policy
    k3 = exp(-x) - 1 + x      unbiased, never negative; GRPO's (arXiv:2402.03300, eq. 4)
"""

from __future__ import annotations

import torch


def kl_estimate(kind: str, log_ratio: torch.Tensor) -> torch.Tensor:
    """[N] estimate of each token, nats. log_ratio: [N] log π - log π_ref."""
    match kind:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return (-log_ratio).exp() - 1 + log_ratio
    raise ValueError(f"no KL estimator {kind!r}; there are k1, k2 and k3")
