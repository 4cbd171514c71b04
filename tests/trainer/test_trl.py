"""Agreement with TRL on fixed tensors: its own `GRPOTrainer._compute_loss` is called on a stub trainer.

TRL averages over padded [B, T] rows of single-reply samples; our sequences are those rows. Where the two
differ by design the test says so.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from areal_agent.config import AlgorithmConfig
from areal_trainers.algorithm.loss import policy_loss

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")

LENGTHS = (5, 1, 7, 3, 6, 2)
LONGEST = 9
ADVANTAGES = (1.3, -0.4, 0.0, -1.1, 0.6, -0.2)
DEFAULTS: dict[str, Any] = dict(
    delta=None,
    use_bias_correction_kl=False,
    sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05,
    steps_per_generation=1,
)


class Fixed:
    """Right-padded logprobs of six replies."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        shape = (len(LENGTHS), LONGEST)
        self.mask = torch.tensor(np.arange(LONGEST) < np.array(LENGTHS)[:, None])
        self.logp = torch.tensor(-rng.exponential(1.5, shape), requires_grad=True)
        noise = torch.tensor(rng.normal(0, 0.4, (3, *shape)))
        self.prox, self.ref = self.logp.detach() + noise[0], self.logp.detach() + noise[1]
        self.behave = self.prox + noise[2]
        self.entropy = torch.tensor(rng.exponential(1.0, shape), requires_grad=True)
        self.advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)


def theirs(fixed: Fixed, *, weights: torch.Tensor | None = None, **settings: Any) -> torch.Tensor:
    attributes: dict[str, Any] = dict(
        loss_type="grpo",
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.28,
        beta=0.0,
        max_completion_length=LONGEST,
        entropy_coef=0.0,
    )
    arguments = SimpleNamespace(**{**DEFAULTS, **{k: v for k, v in settings.items() if k in DEFAULTS}})
    attributes |= {k: v for k, v in settings.items() if k not in DEFAULTS}
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    )
    stub = SimpleNamespace(
        **attributes,
        args=arguments,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=weights is not None,
        current_gradient_accumulation_steps=1,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=attributes["entropy_coef"] > 0,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (fixed.logp, fixed.entropy, None),
    )
    ids = torch.zeros(len(LENGTHS), LONGEST, dtype=torch.long)
    inputs = dict(
        prompt_ids=ids[:, :1],
        prompt_mask=torch.ones(len(LENGTHS), 1),
        completion_ids=ids,
        completion_mask=fixed.mask.double(),
        advantages=fixed.advantages,
        old_per_token_logps=fixed.prox,
        ref_per_token_logps=fixed.ref,
        num_items_in_batch=fixed.mask.sum(),
    )
    if weights is not None:
        inputs["importance_sampling_ratio"] = weights
    return grpo_trainer.GRPOTrainer._compute_loss(stub, None, inputs)


def ours(fixed: Fixed, **settings: Any) -> torch.Tensor:
    algorithm = AlgorithmConfig.model_validate({"correction": "none", **settings})
    n = torch.tensor(LENGTHS)
    of = torch.arange(len(LENGTHS)).repeat_interleave(n)
    per_sequence = {
        "token": (torch.ones(len(n)), torch.ones(len(n))),
        "sequence": (1 / n.double(), 1 / n.double()),
        "constant": (torch.ones(len(n)), algorithm.loss_constant / n.double()),
    }[algorithm.averaging]
    weight, share = (x.double()[of] for x in per_sequence)
    columns = dict(
        advantage=fixed.advantages[of],
        proximal=fixed.prox[fixed.mask],
        behaviour=fixed.behave[fixed.mask],
        reference=fixed.ref[fixed.mask],
        weight=weight,
    )
    sums = policy_loss(algorithm, fixed.logp[fixed.mask], fixed.entropy[fixed.mask], columns, of)
    return sums.loss / share.sum()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": (dict(loss_type="grpo"), dict(averaging="sequence")),
    "bnpo": (dict(loss_type="bnpo"), dict(averaging="token")),
    "dapo": (dict(loss_type="dapo"), dict(averaging="token")),
    "dr_grpo": (dict(loss_type="dr_grpo"), dict(averaging="constant", loss_constant=LONGEST)),
    "grpo, KL": (
        dict(loss_type="grpo", beta=0.04, epsilon_high=0.2),
        dict(recipe="grpo", averaging="sequence"),
    ),
    "gspo": (
        dict(loss_type="grpo", importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
        dict(recipe="gspo"),
    ),
    "gspo, wide bounds": (
        dict(loss_type="grpo", importance_sampling_level="sequence"),
        dict(recipe="gspo", clip_low=0.2, clip_high=0.28),
    ),
    # TRL's epsilon_high is the bound itself here; ours is what is added to 1.
    "cispo": (dict(loss_type="cispo", epsilon_high=5.0), dict(recipe="cispo")),
    "cispo, low bound": (dict(loss_type="cispo", epsilon_high=1.2), dict(recipe="cispo", clip_high=0.2)),
    "sapo": (
        dict(loss_type="sapo", sapo_temperature_neg=1.25),  # TRL makes it float32, where 1.05 is not exact
        dict(recipe="sapo", sapo_temperature_negative=1.25),
    ),
    "entropy bonus": (
        dict(loss_type="dapo", entropy_coef=0.3),
        dict(averaging="token", entropy_coefficient=0.3),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient(case: str) -> None:
    for_trl, for_us = CASES[case]
    results = []
    for compute, options in ((theirs, for_trl), (ours, for_us)):
        fixed = Fixed()
        loss = compute(fixed, **options)
        loss.backward()
        results.append((float(loss.detach()), fixed.logp.grad, fixed.entropy.grad))

    assert results[1][0] == pytest.approx(results[0][0], rel=1e-12)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-12, atol=1e-12)
    assert results[0][1].abs().max() > 0
    if "entropy" in case:
        torch.testing.assert_close(results[1][2], results[0][2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_behaviour_correction(kind: str, level: str) -> None:
    """TRL takes the ratio as an input of its loss; here it is made by our rule and has to enter as theirs does."""
    fixed, other = Fixed(), Fixed()
    log_w = (fixed.prox - fixed.behave) * fixed.mask
    w = (log_w.sum(-1, keepdim=True) if level == "sequence" else log_w).exp()
    w = w.clamp(max=1.3) if kind == "truncate" else w.masked_fill(w > 1.3, 0.0)
    a = theirs(fixed, loss_type="bnpo", weights=w)
    b = ours(other, correction=kind, correction_level=level, behaviour_weight_cap=1.3)
    a.backward()
    b.backward()
    assert float(b.detach()) == pytest.approx(float(a.detach()), rel=1e-12)
    torch.testing.assert_close(other.logp.grad, fixed.logp.grad, rtol=1e-12, atol=1e-12)


def test_its_delta_is_our_dual_clip() -> None:
    """TRL's `delta` bounds the ratio of both signs before the minimum; where A < 0 that is our dual clip, and
    where A > 0 the upper clip is the tighter one: the losses agree while delta exceeds 1 + ε_high."""
    fixed, other = Fixed(), Fixed()
    a = theirs(fixed, loss_type="bnpo", delta=1.4)
    b = ours(other, averaging="token", dual_clip=1.4)
    a.backward()
    b.backward()
    assert float(b.detach()) == pytest.approx(float(a.detach()), rel=1e-12)
    torch.testing.assert_close(other.logp.grad, fixed.logp.grad, rtol=1e-12, atol=1e-12)
