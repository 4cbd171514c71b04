"""What is maximised of each token: its gain g, whose gradient improves the policy where A says so.

    clip             min(u A, clip(u, 1-ε_low, 1+ε_high) A)     PPO (arXiv:1707.06347, eq. 7), DAPO's two bounds;
                     dual clip: at least c A where A < 0        arXiv:1912.09729
    unclipped        u A                                        conservative policy iteration; M2PO
    cispo            sg(clip(u, 1-ε_low, 1+ε_high)) A log π     MiniMax-M1 (arXiv:2506.13585, eq. 4)
    sapo             4/τ σ(τ (u - 1)) A                         arXiv:2511.20347, τ by the sign of A
    policy_gradient  A log π                                    REINFORCE

u is the token's ratio π/π_prox, or its sequence's (GSPO, arXiv:2507.18071).
"""

from __future__ import annotations

import torch

from areal_agent.config import AlgorithmConfig


def gains(
    algorithm: AlgorithmConfig, logprobs: torch.Tensor, u: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """([N] gain, [N] bool tokens whose ratio a clip acted on). All arguments [N]; u and logprobs carry gradients."""
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    none = torch.zeros_like(u, dtype=torch.bool)
    match algorithm.surrogate:
        case "clip":
            gain = torch.minimum(u * advantages, u.clamp(low, high) * advantages)
            clipped = torch.where(advantages > 0, u > high, (u < low) & (advantages < 0))
            if (c := algorithm.dual_clip) is not None:
                gain = torch.where(advantages < 0, torch.maximum(gain, c * advantages), gain)
                clipped = clipped | ((advantages < 0) & (u > c))
            return gain, clipped
        case "unclipped":
            return u * advantages, none
        case "cispo":
            with torch.no_grad():
                bounded = u.clamp(low, high)
            return bounded * advantages * logprobs, bounded != u
        case "sapo":
            positive = u.new_full((), algorithm.sapo_temperature_positive)  # in u's dtype: 1.05 is not exact
            negative = u.new_full((), algorithm.sapo_temperature_negative)
            t = torch.where(advantages > 0, positive, negative)
            return torch.sigmoid(t * (u - 1)) * 4 / t * advantages, none
        case "policy_gradient":
            return logprobs * advantages, none
