"""One rank of the invariance test: gradients of a fixed batch under every recipe and split, written by rank 0.

torchrun --nproc-per-node 2 invariance_rank.py MODEL FOLDER
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from trainer_kit import VOCAB
from transformers import PreTrainedModel

from areal_agent.config import AlgorithmConfig, LoRAConfig, TrainerConfig
from areal_agent.recipes import RECIPES, RecipeName
from areal_agent.trajectory import Batch, Sequence
from areal_trainers.algorithm.critic import Critic, shard_values
from areal_trainers.algorithm.experience import complete
from areal_trainers.algorithm.models import Companions
from areal_trainers.batch import prepare
from areal_trainers.checkpoint import gathered
from areal_trainers.clock import Clock
from areal_trainers.learner import Learner
from areal_trainers.lora import attach
from areal_trainers.model import load_causal_lm, shard
from areal_trainers.optim import Optimizer
from areal_trainers.packing import Item
from areal_trainers.platform import get_platform
from areal_trainers.ranks import Ranks, join_ranks
from areal_trainers.state import trained

VERSION = 3


def fixed_batch(seed: int = 0) -> Batch:
    """Ragged, partly masked; sessions of one to three sequences; groups of equal rewards, missing rewards.

    A group has one prompt, and a session's sequences branch off one another anywhere behind it.
    """
    rng = np.random.default_rng(seed)
    sequences = []
    prompts = {group: rng.integers(0, VOCAB, 7) for group in "abc"}
    for session in range(8):
        reward = [1.0, 0.0, None, 0.3, 0.5, 0.5, 1.0, 0.0][session]
        group = "aaaabbcc"[session]
        stem = prompts[group]
        for _ in range(1 + session % 3):
            ids = np.concatenate([stem, rng.integers(0, VOCAB, int(rng.integers(3, 24)))])
            n = len(ids)
            stem = ids[: int(rng.integers(len(prompts[group]), n + 1))]
            mask = rng.random(n) < 0.6
            mask[0], mask[-1] = False, True
            sequences.append(
                Sequence(
                    token_ids=ids.tolist(),
                    logprobs=[0.0] * n,
                    versions=np.where(mask, rng.integers(0, VERSION + 1, n), -1).tolist(),
                    loss_mask=mask.tolist(),
                    temperature=float(rng.choice([1.0, 0.8])),
                    reward=reward,
                    session_id=f"s{session}",
                    group_id=group,
                    task_id="t",
                )
            )
    return Batch("lease", VERSION, tuple(sequences))


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


CASES: list[tuple[RecipeName, bool]] = [*((name, False) for name in RECIPES), ("decoupled_grpo", True)]
"""(recipe, whether with LoRA) that two ranks compute."""


def gradient(
    ranks: Ranks,
    model: Path,
    budget: int,
    algorithm: AlgorithmConfig | None = None,
    *,
    seed: int = 0,
    order: int | None = None,
    activation_checkpointing: bool = False,
    lora: bool = False,
    share_prefixes: bool = True,
) -> tuple[float, dict[str, np.ndarray], np.ndarray, float]:
    """(loss, gradients by name, the critic's included, stats, entropy) in float64.

    The batch is far enough off-policy that clips, bounds and masks act. order: seed of a permutation.
    lora: an adapter is trained, and is far from 0.
    """
    algorithm = algorithm or AlgorithmConfig()
    lm = load_causal_lm(model)
    if lora:
        attach(lm, LoRAConfig(rank=4), seed=0)
        move(lm, seed=0)
    lm = in_float64(lm)
    policy = shard(lm, ranks.mesh, sequence=ranks.sequence, activation_checkpointing=activation_checkpointing)
    config = TrainerConfig(microbatch_tokens=budget, share_prefixes=share_prefixes)
    companions = Companions(critic=_critic(ranks, model, algorithm, config, activation_checkpointing))
    optimizer = Optimizer(policy.parameters(), learning_rate=1.0)
    learner = Learner(policy, optimizer, ranks, config, Clock(), algorithm, companions)
    work = prepare(
        fixed_batch(seed), version=VERSION, max_staleness=9, dynamic_sampling=algorithm.dynamic_sampling
    )
    logprobs, entropy = learner.logprobs(work.items)
    rng = np.random.default_rng(seed + 1)

    def off(columns: list[np.ndarray], scale: float) -> list[np.ndarray]:
        return [c + rng.normal(0, scale, len(c)) for c in columns]

    proximal, reference = off(logprobs, 0.3), off(logprobs, 0.3)
    items = [
        replace(i, columns={**i.columns, "behaviour": b})
        for i, b in zip(work.items, off(proximal, 0.5), strict=True)
    ]
    values = companions.critic.values(items) if companions.critic else None
    ready: list[Item] = list(
        complete(
            replace(work, items=tuple(items)),
            algorithm,
            proximal=proximal,
            reference=reference if algorithm.needs_reference else None,
            values=off(values, 0.3) if values else None,
        ).items
    )
    if order is not None:
        ready = [ready[i] for i in np.random.default_rng(order).permutation(len(ready))]
    loss, stats, _ = learner.gradient(ready)
    grads = {name: p.grad.full_tensor().numpy() for name, p in trained(lm)}  # type: ignore[union-attr]
    if companions.critic is not None:
        value_loss, clipped = companions.critic.gradient(ready)
        stats = np.append(stats, [value_loss, clipped])
        for name, p in companions.critic.model.named_parameters():
            grads[f"critic.{name}"] = p.grad.full_tensor().numpy()  # type: ignore[union-attr]
    return loss, grads, stats, entropy


def in_float64(lm: PreTrainedModel) -> PreTrainedModel:
    """All of it: transformers' RMSNorm is float32 inside whatever the model is, so the gradient of a sum is not the
    sum of gradients there."""

    def normed(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)  # type: ignore[operator]
        return norm.weight * x * scale  # type: ignore[operator]

    for module in lm.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(normed, module)
    return lm.double()


def move(lm: nn.Module, seed: int) -> None:
    """Draw the adapter's B, which is 0 at first: A then has no gradient."""
    draw = torch.Generator().manual_seed(seed)
    for name, p in lm.named_parameters():
        if ".lora_B." in name:
            p.data.copy_(torch.randn(p.shape, generator=draw) * 0.3)


def _critic(
    ranks: Ranks,
    model: Path,
    algorithm: AlgorithmConfig,
    config: TrainerConfig,
    activation_checkpointing: bool,
) -> Critic | None:
    """With a head that is not 0, or no gradient would reach its backbone."""
    if not algorithm.needs_critic:
        return None
    values = shard_values(
        in_float64(load_causal_lm(model)),
        ranks.mesh,
        torch.float32,
        sequence=ranks.sequence,
        activation_checkpointing=activation_checkpointing,
    )
    with torch.no_grad():
        values.head.weight.fill_(0.3)
    optimizer = Optimizer(values.parameters(), learning_rate=1.0)
    return Critic(values, optimizer, ranks, algorithm, config.microbatch_tokens, config.share_prefixes)


def recipe(name: RecipeName) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"recipe": name})


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, platform = Path(sys.argv[1]), get_platform("cpu")
    with join_ranks(platform):
        for split_name, split in SPLITS.items():
            with join_ranks(platform, split.sequence_parallel) as ranks:
                for name, lora in CASES:
                    loss, grads, stats, entropy = gradient(
                        ranks,
                        folder,
                        64,
                        recipe(name),
                        activation_checkpointing=split.activation_checkpointing,
                        lora=lora,
                    )
                    names = [n for n, _ in gathered(load_causal_lm(folder))]
                    assert lora or names == [n for n in grads if not n.startswith("critic.")]
                    if ranks.first:
                        out = Path(sys.argv[2]) / f"{split_name}, {name}{', lora' * lora}.npz"
                        np.savez(out, loss=loss, stats=stats, entropy=entropy, **grads)  # type: ignore[arg-type]
