"""AdamW on float32 shards: linear warm-up, global-norm clipping, and no step on a non-finite gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class Optimizer:
    """AdamW over sharded parameters.

    Args:
        learning_rate: peak, reached after `warmup_steps` linear steps and held.
        grad_clip: largest global gradient norm; gradients are scaled down to it.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        grad_clip: float = 1.0,
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.peak, self.warmup_steps, self.grad_clip = learning_rate, warmup_steps, grad_clip
        self.adamw = torch.optim.AdamW(
            self.parameters, lr=learning_rate, betas=betas, eps=eps, weight_decay=weight_decay, foreach=True
        )
        self.steps = 0

    @property
    def learning_rate(self) -> float:
        """Rate of the next step."""
        return self.peak * min(1.0, (self.steps + 1) / self.warmup_steps) if self.warmup_steps else self.peak

    def step(self) -> float:
        """Clip, step, clear the gradients; returns the global norm before clipping (all ranks agree).

        A norm that is not finite leaves weights and moments untouched.
        """
        norm = nn.utils.clip_grad_norm_(self.parameters, self.grad_clip)
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(value):
            for group in self.adamw.param_groups:
                group["lr"] = self.learning_rate
            self.adamw.step()
            self.steps += 1
        self.clear()
        return value

    def clear(self) -> None:
        """Drop all gradients."""
        self.adamw.zero_grad(set_to_none=True)
