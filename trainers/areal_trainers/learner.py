"""The policy's two computations: logprobs of a batch under the current weights, and the PPO update.

Invariant: results depend on the items only, not on how they are cut into micro-batches or over ranks
(to rounding). Every rank calls each method with the same items.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from areal_agent.config import TrainerConfig
from areal_trainers.clock import Clock
from areal_trainers.losses import STAT_NAMES, PpoSums, ppo_sum
from areal_trainers.model import Policy
from areal_trainers.optim import Optimizer
from areal_trainers.packing import Item, assign, pack
from areal_trainers.ranks import Ranks


@dataclass(frozen=True)
class Update:
    """What the updates of one batch did: metrics, and how many optimiser steps were skipped (non-finite)."""

    metrics: dict[str, float]
    skipped: int


class Learner:
    """Policy, optimiser and ranks, under one configuration."""

    def __init__(
        self, policy: Policy, optimizer: Optimizer, ranks: Ranks, config: TrainerConfig, clock: Clock
    ) -> None:
        self.policy, self.optimizer, self.ranks, self.config, self.clock = (
            policy,
            optimizer,
            ranks,
            config,
            clock,
        )

    @torch.no_grad()
    def logprobs(self, items: Sequence[Item]) -> tuple[list[np.ndarray], float]:
        """(per item [n] float64 logprobs of its predicted tokens, mean entropy in nats), on every rank."""
        offsets = np.concatenate([[0], np.cumsum([i.predicted for i in items])])
        flat = np.zeros(int(offsets[-1]) + 1)  # the last place carries the sum of entropies
        for indices in self._share(items):
            micro = pack(items, indices, self.ranks.device)
            logprobs, entropies = self.policy(micro)
            values = logprobs.double().cpu().numpy()
            flat[-1] += float(entropies.double().sum())
            at = 0
            for i in indices:
                n = items[i].predicted
                flat[offsets[i] : offsets[i + 1]] = values[at : at + n]
                at += n
        # A forward without a backward leaves the root gathered; an optimiser step would not reach that copy.
        self.policy.reshard()  # type: ignore[operator]  (added by fully_shard)
        whole = self.ranks.sum_array(flat)
        return [whole[a:b] for a, b in itertools.pairwise(offsets)], whole[-1] / offsets[-1]

    def update(self, items: Sequence[Item], proximal: Sequence[np.ndarray], seed: int) -> Update:
        """The optimiser updates of one batch; `proximal` as `logprobs` gave it before the first of them."""
        ready = [
            replace(item, columns={**item.columns, "proximal": p})
            for item, p in zip(items, proximal, strict=True)
        ]
        stats, weight_max, skipped = np.zeros(len(STAT_NAMES)), 0.0, 0
        losses, norms = [], []
        parts = _minibatches(ready, self.config.minibatches, seed)
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
        named = dict(zip(STAT_NAMES, stats.tolist(), strict=True))
        n = max(1.0, named["tokens"])
        return Update(
            {
                "loss": float(np.mean(losses)) if losses else math.nan,
                "grad_norm": float(np.mean(norms)) if norms else math.nan,
                "clip_fraction": named["clipped"] / n,
                "behaviour_weight_mean": named["weight"] / n,
                "behaviour_weight_max": weight_max,
                "behaviour_weight_truncated": named["truncated"] / n,
                "kl_proximal": named["kl_proximal"] / n,
                "kl_behaviour": named["kl_behaviour"] / n,
                "skipped_steps": float(skipped),
            },
            skipped,
        )

    def gradient(self, items: Sequence[Item]) -> tuple[float, np.ndarray, float]:
        """(loss, stat sums, largest behaviour weight); leaves the gradient of the token-mean loss.

        Sequences with advantage 0 have a gradient of exactly 0: they count in the mean, and their forward
        and backward are left out.
        """
        total = sum(i.predicted for i in items)
        moving = [i for i in items if np.any(i.columns["advantage"] != 0.0)]
        loss, weight_max = 0.0, 0.0
        stats = np.zeros(len(STAT_NAMES))
        for indices in self._share(moving):
            sums = self._backward(moving, indices, total)
            loss += float(sums.loss.detach()) / total
            stats += sums.stats.cpu().numpy()
            weight_max = max(weight_max, sums.weight_max)
        loss, *summed = self.ranks.sum([loss, *stats.tolist()])
        return loss, np.array(summed), self.ranks.max([weight_max])[0]

    def _backward(self, items: Sequence[Item], indices: list[int], total: int) -> PpoSums:
        micro = pack(items, indices, self.ranks.device)
        with self.clock("forward"):
            logprobs, _ = self.policy(micro)

        def column(name: str) -> torch.Tensor:
            return micro.columns[name].to(logprobs.dtype) if indices else logprobs.new_zeros(0)

        sums = ppo_sum(
            logprobs,
            column("proximal"),
            column("behaviour"),
            column("advantage"),
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            weight_cap=self.config.behaviour_weight_cap,
        )
        # FSDP averages gradients over ranks; the loss is a sum over them.
        with self.clock("backward"):
            (sums.loss * (self.ranks.size / total)).backward()
        return sums

    def _share(self, items: Sequence[Item]) -> list[list[int]]:
        return assign([len(i) for i in items], self.config.microbatch_tokens, self.ranks.data_size)[
            self.ranks.data_rank
        ]


def _minibatches(items: Sequence[Item], count: int, seed: int) -> list[list[Item]]:
    """Shuffled and dealt into `count` parts of level token numbers (fewer when there are fewer items)."""
    if count == 1:
        return [list(items)]
    order = np.random.default_rng(seed).permutation(len(items)).tolist()
    parts: list[list[Item]] = [[] for _ in range(min(count, len(items)))]
    loads = [0] * len(parts)
    for i in order:
        j = loads.index(min(loads))
        parts[j].append(items[i])
        loads[j] += items[i].predicted
    return parts
