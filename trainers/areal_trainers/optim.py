"""AdamW on float32 shards: a schedule, global-norm clipping, and no step on a non-finite gradient.

Invariant: parameters and moments are float32 whatever the compute dtype. In bfloat16 an update smaller than
1/256 of a weight is lost, and learning stops there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from areal_agent.config import TrainerConfig

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda part: 1.0,
    "linear": lambda part: 1.0 - part,
    "cosine": lambda part: 0.5 * (1.0 + math.cos(math.pi * part)),
}
"""Schedule -> height between the lowest rate (0) and the peak (1), at a part in [0, 1] of the way."""


class Optimizer:
    """AdamW over sharded parameters.

    Args:
        learning_rate: peak, reached after `warmup_steps` linear steps.
        schedule: what follows: `constant` holds it; `linear` and `cosine` lower it to `min_lr_ratio` of the
            peak at step `total_steps`, and hold that.
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
        schedule: str = "constant",
        total_steps: int = 0,
        min_lr_ratio: float = 0.0,
        grad_clip: float = 1.0,
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.peak, self.warmup_steps, self.grad_clip = learning_rate, warmup_steps, grad_clip
        self._shape, self.total_steps, self.min_lr_ratio = SHAPES[schedule], total_steps, min_lr_ratio
        self.adamw = torch.optim.AdamW(
            self.parameters, lr=learning_rate, betas=betas, eps=eps, weight_decay=weight_decay, foreach=True
        )
        self.steps = 0

    @classmethod
    def of(
        cls, config: TrainerConfig, parameters: Iterable[nn.Parameter], learning_rate: float | None = None
    ) -> Optimizer:
        """As the settings say; `learning_rate` in place of theirs."""
        return cls(
            parameters,
            learning_rate=config.learning_rate if learning_rate is None else learning_rate,
            betas=config.adam_betas,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            warmup_steps=config.warmup_steps,
            schedule=config.schedule,
            total_steps=config.steps * config.minibatches,
            min_lr_ratio=config.min_lr_ratio,
            grad_clip=config.grad_clip,
        )

    @property
    def learning_rate(self) -> float:
        """Rate of the next step."""
        if self.steps < self.warmup_steps:
            return self.peak * (self.steps + 1) / self.warmup_steps
        length = self.total_steps - self.warmup_steps
        part = min(1.0, (self.steps - self.warmup_steps) / length) if length > 0 else 0.0
        return self.peak * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * self._shape(part))

    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """AdamW's own tensors of a parameter, as it will use them: step [], exp_avg and exp_avg_sq [shape]."""
        state = self.adamw.state[parameter]
        if not state:  # before the first step AdamW has none; these are what it would begin with
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
        return {name: state[name] for name in ("step", "exp_avg", "exp_avg_sq")}

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
