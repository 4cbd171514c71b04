"""The models that some algorithms need beside the policy: a frozen reference, a critic. Loaded only then."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from areal_agent.config import RunConfig
from areal_trainers.algorithm.critic import Critic, shard_values
from areal_trainers.model import Policy, load_causal_lm, shard
from areal_trainers.optim import Optimizer
from areal_trainers.platform import Platform
from areal_trainers.ranks import Ranks


@dataclass(frozen=True)
class Companions:
    """reference: gives logprobs, takes no gradient; `reference_within` instead: it is the policy without its LoRA
    adapter. critic: gives values, and learns."""

    reference: Policy | None = None
    reference_within: bool = False
    critic: Critic | None = None


def load_companions(config: RunConfig, ranks: Ranks, platform: Platform) -> Companions:
    """What `config.algorithm` needs, each starting from the folder the policy starts from (the reference from
    `algorithm.reference` where that is set). A collective. Raises ConfigError for a folder it cannot load."""
    algorithm, t = config.algorithm, config.trainer
    dtype = getattr(torch, t.compute_dtype)
    reference = critic = None
    within = algorithm.needs_reference and t.lora.rank > 0 and not algorithm.reference
    if algorithm.needs_reference and not within:
        lm = load_causal_lm(algorithm.reference or config.model).requires_grad_(False)
        reference = shard(
            lm,
            ranks.mesh,
            dtype,
            kernel=platform.attention,
            sequence=ranks.sequence,
            cpu_offload=t.cpu_offload,
        )
    if algorithm.needs_critic:
        model = shard_values(
            load_causal_lm(config.model),
            ranks.mesh,
            dtype,
            kernel=platform.attention,
            sequence=ranks.sequence,
            activation_checkpointing=t.activation_checkpointing,
            cpu_offload=t.cpu_offload,
        )
        optimizer = Optimizer.of(t, model.parameters(), algorithm.critic_learning_rate)
        critic = Critic(model, optimizer, ranks, algorithm, t.microbatch_tokens, t.share_prefixes)
    return Companions(reference, within, critic)
