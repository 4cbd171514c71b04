"""The policy's computations: logprobs of a batch under the current weights, and the update.

Invariant: results depend on the items only, not on how they are cut into micro-batches or over ranks
(to rounding). Every rank calls each method with the same items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from areal_agent.config import AlgorithmConfig, TrainerConfig
from areal_trainers.algorithm.experience import Columns, Experience, complete
from areal_trainers.algorithm.loss import STAT_NAMES, Sums, policy_loss
from areal_trainers.algorithm.models import Companions
from areal_trainers.batch import TrainBatch
from areal_trainers.clock import Clock
from areal_trainers.evaluate import evaluate, micro_batches
from areal_trainers.lora import without_adapter
from areal_trainers.model import Policy
from areal_trainers.optim import Optimizer
from areal_trainers.packing import Item, MicroBatch
from areal_trainers.ranks import Ranks


@dataclass(frozen=True)
class Update:
    """What the updates of one batch did: metrics, and how many optimiser steps were skipped (non-finite)."""

    metrics: dict[str, float]
    skipped: int


class Learner:
    """Policy, optimiser and ranks, under one configuration; with the companions the algorithm needs."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        ranks: Ranks,
        config: TrainerConfig,
        clock: Clock,
        algorithm: AlgorithmConfig | None = None,
        companions: Companions | None = None,
    ) -> None:
        self.policy, self.optimizer, self.ranks, self.config, self.clock = (
            policy,
            optimizer,
            ranks,
            config,
            clock,
        )
        self.algorithm = algorithm or AlgorithmConfig()
        self.companions = companions or Companions()

    def logprobs(self, items: Sequence[Item], policy: Policy | None = None) -> tuple[list[np.ndarray], float]:
        """(per item [n] float64 logprobs of its predicted tokens, mean entropy in nats), on every rank.

        policy: another than the one being trained.
        """
        model = policy or self.policy
        found = evaluate(model, items, self.ranks, self.config.microbatch_tokens, self.config.share_prefixes)
        # A forward without a backward leaves the root gathered; an optimiser step would not reach that copy.
        model.reshard()  # type: ignore[operator]  (added by fully_shard)
        return found

    def proximal(self, items: Sequence[Item]) -> tuple[list[np.ndarray] | None, dict[str, float]]:
        """(as `logprobs`, or None where the algorithm does without; {entropy}, or nothing)."""
        if self.algorithm.proximal != "recompute":
            return None, {}
        values, entropy = self.logprobs(items)
        return values, {"entropy": entropy}

    def experience(self, work: TrainBatch, proximal: Columns | None) -> Experience:
        """What `update` takes: the items of `work` with the columns of the algorithm."""
        reference = values = None
        if self.companions.reference is not None:
            with self.clock("reference"):
                reference = self.logprobs(work.items, self.companions.reference)[0]
        elif self.companions.reference_within:
            with self.clock("reference"), without_adapter(self.policy.lm):
                reference = self.logprobs(work.items)[0]
        if self.companions.critic is not None:
            with self.clock("values"):
                values = self.companions.critic.values(work.items)
        return complete(work, self.algorithm, proximal=proximal, reference=reference, values=values)

    def update(self, items: Sequence[Item], seed: int) -> Update:
        """The optimiser updates of one batch, policy and critic; items as `experience` made them."""
        stats, weight_max, skipped = np.zeros(len(STAT_NAMES)), 0.0, 0
        losses, norms = [], []
        critics: list[dict[str, float]] = []
        parts = _minibatches(items, self.config.minibatches, seed)
        for part in parts:
            loss, part_stats, part_max = self.gradient(part)
            stats += part_stats
            weight_max = max(weight_max, part_max)
            with self.clock("step"):
                norm = math.nan
                if math.isfinite(loss):
                    norm = self.optimizer.step()
                else:
                    self.optimizer.clear()
            if math.isfinite(norm):
                losses.append(loss)
                norms.append(norm)
            else:
                skipped += 1
                if self.ranks.first:
                    print(
                        f"areal_trainers: skipped an optimiser step: loss {loss}, gradient norm {norm}; weights "
                        "are unchanged",
                        flush=True,
                    )
            if self.companions.critic is not None:
                with self.clock("critic"):
                    critics.append(self.companions.critic.step(part))
        named = dict(zip(STAT_NAMES, stats.tolist(), strict=True))
        n = max(1.0, named["tokens"])
        metrics = {
            "loss": float(np.mean(losses)) if losses else math.nan,
            "grad_norm": float(np.mean(norms)) if norms else math.nan,
            "clip_fraction": named["clipped"] / n,
            "behaviour_weight_mean": named["weight"] / n,
            "behaviour_weight_max": weight_max,
            "behaviour_weight_truncated": named["truncated"] / n,
            "kl_proximal": named["kl_proximal"] / n,
            "kl_behaviour": named["kl_behaviour"] / n,
            "entropy": named["entropy"] / n,
            "skipped_steps": float(skipped),
        }
        if self.algorithm.needs_reference:
            metrics["kl_reference"] = named["kl_reference"] / n
        for name in critics[0] if critics else ():
            metrics[name] = float(np.mean([c[name] for c in critics]))
        return Update(metrics, skipped)

    def gradient(self, items: Sequence[Item]) -> tuple[float, np.ndarray, float]:
        """(loss, stat sums, largest behaviour weight); leaves the gradient of the averaged loss.

        Sequences with advantage 0 have a gradient of exactly 0 unless KL or entropy add to it: they count
        in the mean, and their forward and backward are left out.
        """
        total = sum(float(i.columns["share"].sum()) for i in items) or 1.0
        everywhere = self.algorithm.kl == "loss" or self.algorithm.entropy_coefficient > 0
        moving = [i for i in items if everywhere or np.any(i.columns["advantage"] != 0.0)]
        loss, weight_max = 0.0, 0.0
        stats = np.zeros(len(STAT_NAMES))
        c = self.config
        for micro in micro_batches(moving, self.ranks, c.microbatch_tokens, c.share_prefixes):
            sums = self._backward(moving, micro, total)
            loss += float(sums.loss.detach()) / total
            stats += sums.stats.cpu().numpy()
            weight_max = max(weight_max, sums.weight_max)
        loss, *summed = self.ranks.sum([loss, *stats.tolist()])
        return loss, np.array(summed), self.ranks.max([weight_max])[0]

    def _backward(self, items: Sequence[Item], micro: MicroBatch, total: float) -> Sums:
        with self.clock("forward"):
            logprobs, entropies = self.policy(micro)
        names = items[0].columns if items else ("proximal", "behaviour", "advantage", "weight", "reference")
        columns = {
            name: micro.columns[name].to(logprobs.dtype) if micro.items else logprobs.new_zeros(0)
            for name in names
        }
        counts = torch.tensor(
            [items[i].predicted for i in micro.items], dtype=torch.int64, device=logprobs.device
        )
        sequence = torch.repeat_interleave(torch.arange(len(micro.items), device=logprobs.device), counts)
        with self.clock("forward"):
            sums = policy_loss(self.algorithm, logprobs, entropies, columns, sequence)
        # FSDP averages gradients over ranks; the loss is a sum over them.
        with self.clock("backward"):
            (sums.loss * (self.ranks.size / total)).backward()
        return sums


def _minibatches(items: Sequence[Item], count: int, seed: int) -> list[list[Item]]:
    """Shuffled and dealt into `count` parts of level token numbers (fewer when there are fewer items)."""
    if count == 1:
        return [list(items)]
    order = np.random.default_rng(seed).permutation(len(items)).tolist()
    parts: list[list[Item]] = [[] for _ in range(max(1, min(count, len(items))))]
    loads = [0] * len(parts)
    for i in order:
        j = loads.index(min(loads))
        parts[j].append(items[i])
        loads[j] += items[i].predicted
    return parts
