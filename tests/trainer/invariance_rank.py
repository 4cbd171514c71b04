"""One rank of the invariance test: the gradient of a fixed batch under each split, written by rank 0.

torchrun --nproc-per-node 2 invariance_rank.py MODEL FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from trainer_kit import VOCAB

from areal_agent.config import TrainerConfig
from areal_trainers.checkpoint import gathered
from areal_trainers.clock import Clock
from areal_trainers.learner import Learner
from areal_trainers.model import load_causal_lm, shard
from areal_trainers.optim import Optimizer
from areal_trainers.packing import Item
from areal_trainers.platform import get_platform
from areal_trainers.ranks import Ranks, join_ranks


def fixed_items(seed: int = 0) -> list[Item]:
    """Ragged sequences, partly masked, some with advantage 0, far enough off-policy that clips act."""
    rng = np.random.default_rng(seed)
    items = []
    for n in rng.integers(3, 40, 13):
        mask = rng.random(n) < 0.6
        mask[0], mask[-1] = False, True
        k = int(mask.sum())
        advantage = float(rng.choice([-1.0, 0.0, 0.7]))
        items.append(
            Item(
                rng.integers(0, VOCAB, n),
                mask,
                float(rng.choice([1.0, 0.8])),
                {
                    "advantage": np.full(k, advantage),
                    "noise": rng.normal(0, 0.3, k),
                    "drift": rng.normal(0, 0.5, k),
                },
            )
        )
    return items


@dataclass(frozen=True)
class Split:
    """How two ranks share the batch."""

    sequence_parallel: int = 1
    activation_checkpointing: bool = False


SPLITS = {
    "data parallel": Split(),
    "sequence parallel": Split(sequence_parallel=2),
    "sequence parallel, activations recomputed": Split(2, activation_checkpointing=True),
}


def gradient(
    ranks: Ranks, model: Path, items: list[Item], budget: int, *, activation_checkpointing: bool = False
) -> tuple[float, dict[str, np.ndarray], np.ndarray, float]:
    """(loss, gradients by name, stats, entropy) in float64."""
    lm = load_causal_lm(model).double()
    policy = shard(lm, ranks.mesh, sequence=ranks.sequence, activation_checkpointing=activation_checkpointing)
    config = TrainerConfig(microbatch_tokens=budget)
    learner = Learner(policy, Optimizer(policy.parameters(), learning_rate=1.0), ranks, config, Clock())
    logprobs, entropy = learner.logprobs(items)
    ready = [
        Item(i.token_ids, i.loss_mask, i.temperature, {**i.columns, "proximal": p + i.columns["noise"]})
        for i, p in zip(items, logprobs, strict=True)
    ]
    for item in ready:
        item.columns["behaviour"] = item.columns["proximal"] + item.columns["drift"]  # type: ignore[index]
    loss, stats, _ = learner.gradient(ready)
    grads = {
        name: p.grad.full_tensor().numpy()  # type: ignore[union-attr]
        for name, p in lm.named_parameters()
    }
    return loss, grads, stats, entropy


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, platform = Path(sys.argv[1]), get_platform("cpu")
    with join_ranks(platform):
        for name, split in SPLITS.items():
            with join_ranks(platform, split.sequence_parallel) as ranks:
                loss, grads, stats, entropy = gradient(
                    ranks,
                    folder,
                    fixed_items(),
                    64,
                    activation_checkpointing=split.activation_checkpointing,
                )
            assert [n for n, _ in gathered(load_causal_lm(folder))] == list(grads)
            if ranks.first:
                out = Path(sys.argv[2]) / f"{name}.npz"
                np.savez(out, loss=loss, stats=stats, entropy=entropy, **grads)  # type: ignore[arg-type]
