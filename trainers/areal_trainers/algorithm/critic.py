"""The critic of PPO: a value for the state before each trained token, and its own regression step.

    ℓ_t = ½ max((V_t - R_t)², (clip(V_t, V_old ± ε) - R_t)²)       value clip, as in PPO's reference code
    loss = c Σ_t count_t ℓ_t / Σ_t count_t                        over the whole (mini-)batch

A copy of the policy's starting model with a linear head in place of the vocabulary's, sharded as the policy
is. The head starts at 0, so that first advantages are plain rewards and not a random network's opinion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from areal_agent.config import AlgorithmConfig
from areal_trainers.attention import choose_kernel
from areal_trainers.evaluate import evaluate, micro_batches
from areal_trainers.model import fully_shard_over, packed_inputs
from areal_trainers.optim import Optimizer
from areal_trainers.packing import Item, MicroBatch
from areal_trainers.ranks import Ranks
from areal_trainers.ulysses import SequenceGroup

VALUE_COLUMNS = ("value", "return", "value_count")


class ValueModel(nn.Module):
    """`model(micro)` -> [N] values of the states before the predicted tokens.

    Args: as those of areal_trainers.model.Policy.
    """

    def __init__(
        self, lm: PreTrainedModel, kernel: str = "sdpa", sequence: SequenceGroup | None = None
    ) -> None:
        super().__init__()
        self.kernel, self.sequence = kernel, sequence
        self.backbone = lm.base_model
        self.head = nn.Linear(lm.config.hidden_size, 1, dtype=lm.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, micro: MicroBatch) -> torch.Tensor:
        if self.sequence is None:
            return self._values(micro, micro)
        part, owner = self.sequence.cut(micro)
        return self.sequence.gather(self._values(micro, part)[None], owner)[0].clone()

    def _values(self, whole: MicroBatch, part: MicroBatch) -> torch.Tensor:
        inputs = packed_inputs(whole, part, self.kernel, self.sequence)
        hidden = self.backbone(**inputs).last_hidden_state[0].index_select(0, part.predict)
        value = self.head(hidden)[:, 0].clone()  # FSDP hooks the backward on what is returned; no view
        return value if value.dtype == torch.float64 else value.float()


def shard_values(
    lm: PreTrainedModel,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    *,
    kernel: str = "sdpa",
    sequence: SequenceGroup | None = None,
    activation_checkpointing: bool = False,
    cpu_offload: bool = False,
) -> ValueModel:
    """A critic made of `lm`, which is used up, sharded over `mesh` as areal_trainers.model.shard does."""
    model = ValueModel(lm, choose_kernel(kernel, compute_dtype), sequence)
    fully_shard_over(model, lm, mesh, compute_dtype, activation_checkpointing, cpu_offload)
    return model


class Critic:
    """Value model and its optimiser. Every rank calls each method with the same items."""

    def __init__(
        self,
        model: ValueModel,
        optimizer: Optimizer,
        ranks: Ranks,
        algorithm: AlgorithmConfig,
        microbatch_tokens: int,
        share_prefixes: bool,
    ) -> None:
        self.model, self.optimizer, self.ranks = model, optimizer, ranks
        self.algorithm, self.packing = algorithm, (microbatch_tokens, share_prefixes)

    def values(self, items: Sequence[Item]) -> list[np.ndarray]:
        """Per item [n] float64 values of its predicted tokens."""

        def forward(micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
            value = self.model(micro)
            return value, value

        found = evaluate(forward, items, self.ranks, *self.packing)[0]
        self.model.reshard()  # type: ignore[operator]  (added by fully_shard)
        return found

    def gradient(self, items: Sequence[Item]) -> tuple[float, float]:
        """(loss, fraction of values the clip acted on); leaves the gradient. Items as `complete` made them."""
        total = max(1.0, sum(float(i.columns["value_count"].sum()) for i in items))
        loss, clipped = 0.0, 0.0
        for micro in micro_batches(items, self.ranks, *self.packing):
            values: torch.Tensor = self.model(micro)
            columns = micro.columns if micro.items else {name: values for name in VALUE_COLUMNS}
            part, part_clipped = value_loss(self.algorithm, values, columns)
            # FSDP averages gradients over ranks; the loss is a sum over them.
            (part * (self.ranks.size / total)).backward()
            loss += float(part.detach()) / total
            clipped += float(part_clipped) / total
        loss, clipped = self.ranks.sum([loss, clipped])
        return loss, clipped

    def step(self, items: Sequence[Item]) -> dict[str, float]:
        """One update; a non-finite loss or gradient leaves the weights as they are."""
        loss, clipped = self.gradient(items)
        norm = math.nan
        if math.isfinite(loss):
            norm = self.optimizer.step()
        else:
            self.optimizer.clear()
        return {"value_loss": loss, "value_clip_fraction": clipped, "value_grad_norm": norm}


def value_loss(
    algorithm: AlgorithmConfig, values: torch.Tensor, columns: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weighted SUM of the loss over [N] tokens, number of values the clip acted on)."""
    old, returns, counts = (columns[n].to(values.dtype).detach() for n in VALUE_COLUMNS)
    error = (values - returns).square()
    clipped = torch.zeros_like(error, dtype=torch.bool)
    if (ε := algorithm.value_clip) is not None:
        bounded = (old + (values - old).clamp(-ε, ε) - returns).square()
        clipped = bounded > error
        error = torch.maximum(error, bounded)
    return algorithm.value_coefficient * 0.5 * (counts * error).sum(), (counts * clipped).sum().detach()
