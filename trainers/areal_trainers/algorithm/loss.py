"""The policy's loss, composed of its parts, per token and to be minimised:

    ℓ_t = - w_t · gain(u_t, A_t) + β k(π, π_ref) - c H(π)

    w  behaviour weight (correction)    u  ratio to the proximal policy, per token or sequence
    k  KL estimate, when in the loss    H  entropy of the token's distribution

Invariant: `policy_loss` returns weighted SUMS over whole sequences. The caller divides by the sum of shares of
the WHOLE batch (averaging), so that micro-batches, packing and ranks cannot be seen in the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from areal_agent.config import AlgorithmConfig
from areal_trainers.algorithm.correction import behaviour_weight
from areal_trainers.algorithm.kl import kl_estimate
from areal_trainers.algorithm.surrogate import gains

STAT_NAMES = (
    "tokens",
    "clipped",
    "weight",
    "truncated",
    "kl_proximal",
    "kl_behaviour",
    "kl_reference",
    "entropy",
)


@dataclass(frozen=True)
class Sums:
    """Sums over N tokens.

    Attributes:
        loss: scalar with gradient.
        stats: [len(STAT_NAMES)] float64: count; tokens a clip acted on; behaviour weight as used; tokens whose
            behaviour weight was changed; k3 estimate of KL(prox ‖ current), of KL(behave ‖ prox), of
            KL(current ‖ reference) (0 without one); entropy.
        weight_max: largest behaviour weight before bounds and masks.
    """

    loss: torch.Tensor
    stats: torch.Tensor
    weight_max: float


def policy_loss(
    algorithm: AlgorithmConfig,
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
    columns: Mapping[str, torch.Tensor],
    sequence: torch.Tensor,
) -> Sums:
    """The loss of a micro-batch of S whole sequences.

    Args:
        logprobs, entropies: [N], nats, with gradients.
        columns: [N] each, without: `advantage`, `behaviour`, `weight`; `proximal` or, for loglinear, `alpha`;
            `reference` when the KL is in the loss; `keep` for the second-moment mask.
        sequence: [N] int64 in [0, S): which sequence a token belongs to.
    """
    behaviour = columns["behaviour"]
    proximal = proximal_logprobs(algorithm, logprobs.detach(), columns)
    token_log_u = logprobs - proximal
    log_u = _sequence_mean(token_log_u, sequence) if algorithm.ratio == "sequence" else token_log_u
    gain, clipped = gains(algorithm, logprobs, log_u.exp(), columns["advantage"])
    token_log_w = proximal - behaviour
    log_w = _sequence_sum(token_log_w, sequence) if algorithm.correction_level == "sequence" else token_log_w
    weight, changed = behaviour_weight(algorithm, log_w, columns.get("keep"))
    loss = -gain if weight is None else -(weight * gain)
    log_ref = logprobs - columns["reference"] if "reference" in columns else None
    if algorithm.kl == "loss":
        assert log_ref is not None
        loss = loss + algorithm.kl_coefficient * kl_estimate(algorithm.kl_estimator, log_ref)
    if algorithm.entropy_coefficient:
        loss = loss - algorithm.entropy_coefficient * entropies
    with torch.no_grad():
        raw = log_w.exp()
        stats = [
            torch.ones_like(logprobs),
            clipped,
            torch.ones_like(logprobs) if weight is None else weight,
            changed,
            token_log_u.exp() - 1 - token_log_u,
            token_log_w.exp() - 1 - token_log_w,
            torch.zeros_like(logprobs) if log_ref is None else kl_estimate("k3", log_ref),
            entropies,
        ]
    return Sums(
        (loss * columns["weight"]).sum(),
        torch.stack([s.sum().double() for s in stats]).detach(),
        float(raw.max()) if len(raw) else 0.0,
    )


def proximal_logprobs(
    algorithm: AlgorithmConfig, current: torch.Tensor, columns: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """[N] log π_prox: as recomputed, the behaviour policy's, or interpolated without a forward of its own.

    loglinear: log π_prox ≈ log π_behave + α (log π - log π_behave), α = (v_prox - v_behave) / (v - v_behave)
    with v_prox the version held when the batch came and v = v_prox + 1 the one being made (A-3PO,
    arXiv:2512.06547). A token of the held version has α = 0: its proximal policy is its behaviour policy.
    """
    if algorithm.proximal != "loglinear":
        return columns["proximal"]
    behaviour = columns["behaviour"]
    return behaviour + columns["alpha"] * (current - behaviour)


def _sequence_sum(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """[N] -> [N] sum of the token's sequence."""
    count = int(sequence.max()) + 1 if len(sequence) else 0
    return values.new_zeros(count).index_add(0, sequence, values)[sequence]


def _sequence_mean(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    return _sequence_sum(values, sequence) / _sequence_sum(torch.ones_like(values), sequence)
