"""The decoupled PPO objective (AReaL, arXiv:2505.24298, eq. 5), per token, to be minimised:

    ℓ_t = - w_t · min(u_t A_t, clip(u_t, 1 - ε_low, 1 + ε_high) A_t)
    u_t = π(a_t) / π_prox(a_t)                        the clip is around the proximal policy
    w_t = min(π_prox(a_t) / π_behave(a_t), cap)       carries no gradient; corrects for staleness

Invariant: `ppo_sum` returns sums. The caller divides by the number of tokens of the WHOLE batch, so that
micro-batches, packing and ranks cannot be seen in the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

STAT_NAMES = ("tokens", "clipped", "weight", "truncated", "kl_proximal", "kl_behaviour")


@dataclass(frozen=True)
class PpoSums:
    """Sums over N tokens.

    Attributes:
        loss: scalar with gradient.
        stats: [len(STAT_NAMES)] float64: count; tokens whose gradient the clip removed; behaviour weight
            after truncation; tokens truncated; k3 estimate of KL(prox ‖ current), of KL(behave ‖ prox).
        weight_max: largest behaviour weight before truncation.
    """

    loss: torch.Tensor
    stats: torch.Tensor
    weight_max: float


def ppo_sum(
    logprobs: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weight_cap: float,
) -> PpoSums:
    """All arguments [N], logprobs in nats; only `logprobs` carries a gradient."""
    log_u = logprobs - proximal
    u = log_u.exp()
    raw_weight = (proximal - behaviour).exp()
    weight = raw_weight.clamp(max=weight_cap)
    gain = torch.minimum(u * advantages, u.clamp(1 - clip_low, 1 + clip_high) * advantages)
    loss = -(weight * gain).sum()
    with torch.no_grad():
        outside = torch.where(advantages > 0, u > 1 + clip_high, (u < 1 - clip_low) & (advantages < 0))
        stats = torch.stack(
            [
                torch.ones_like(u).sum(),
                outside.sum(),
                weight.sum(),
                (raw_weight > weight_cap).sum(),
                (u - 1 - log_u).sum(),
                (raw_weight - 1 - (proximal - behaviour)).sum(),
            ]
        ).double()
    return PpoSums(loss, stats, float(raw_weight.max()) if len(raw_weight) else 0.0)
