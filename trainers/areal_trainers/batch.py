"""A leased batch as the learner's items: advantages per session, staleness checked, gap checked.

Invariant: an item exists for every sequence that carries loss and whose session has a reward; its columns
have one value per predicted token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_agent.errors import TrainerError
from areal_agent.trajectory import Batch
from areal_trainers.advantages import group_advantages
from areal_trainers.packing import Item


@dataclass(frozen=True)
class TrainBatch:
    """What one step trains on.

    Attributes:
        version: policy version of trainer and fleet.
        items: columns `advantage`, `behaviour` (engine logprob), `version`, per predicted token.
        sources: index into the leased batch's sequences, per item.
        batch: as leased.
        metrics: numbers of the batch itself.
    """

    version: int
    items: tuple[Item, ...]
    sources: tuple[int, ...]
    batch: Batch
    metrics: dict[str, float]

    @property
    def tokens(self) -> int:
        """Predicted tokens."""
        return sum(i.predicted for i in self.items)


def prepare(batch: Batch, *, version: int, max_staleness: int, normalise: bool = True) -> TrainBatch:
    """Leased batch -> items.

    Raises TrainerError when it belongs to another version, is staler than allowed, or trains nothing.
    """
    if batch.version != version:
        raise TrainerError(
            f"lease {batch.lease_id} was cut at version {batch.version} but the trainer holds {version}; "
            "is another trainer updating this fleet?"
        )
    if (stale := batch.staleness()) > max_staleness:
        raise TrainerError(
            f"lease {batch.lease_id} holds tokens {stale} versions old, more than max_staleness = "
            f"{max_staleness}; admission at the gateway let them through, which it must not"
        )
    rewards = {s.session_id: s.reward for s in batch.sequences}
    groups = {s.session_id: s.group_id for s in batch.sequences}
    advantages = group_advantages(rewards, groups, normalise=normalise)
    items, sources = [], []
    for index, s in enumerate(batch.sequences):
        mask = np.asarray(s.loss_mask, bool)
        if not mask.any() or s.session_id not in advantages:
            continue
        if mask[0]:
            raise TrainerError(f"session {s.session_id} trains its first token, which nothing precedes")
        n = int(mask.sum())
        items.append(
            Item(
                token_ids=np.asarray(s.token_ids, np.int64),
                loss_mask=mask,
                temperature=s.temperature,
                columns={
                    "advantage": np.full(n, advantages[s.session_id]),
                    "behaviour": np.asarray(s.logprobs, np.float64)[mask],
                    "version": np.asarray(s.versions, np.float64)[mask],
                },
            )
        )
        sources.append(index)
    if not items:
        raise TrainerError(f"lease {batch.lease_id} has no trained token with a reward; nothing to train on")
    return TrainBatch(
        version, tuple(items), tuple(sources), batch, _metrics(batch, items, rewards, groups, advantages)
    )


def _metrics(
    batch: Batch,
    items: Sequence[Item],
    rewards: dict[str, float | None],
    groups: dict[str, str],
    advantages: dict[str, float],
) -> dict[str, float]:
    known = np.array([r for r in rewards.values() if r is not None])
    ages = batch.version - np.concatenate([i.columns["version"] for i in items])
    flat = [
        all(advantages.get(s, 0.0) == 0.0 for s, of in groups.items() if of == g)
        for g in set(groups.values())
    ]
    return {
        "reward_mean": float(known.mean()),
        "reward_std": float(known.std()),
        "sessions": len(rewards),
        "rewards_missing": len(rewards) - len(known),
        "groups": len(flat),
        "groups_zero_advantage": float(np.mean(flat)),
        "sequences": len(items),
        "tokens": sum(map(len, items)),
        "trained_tokens": sum(i.predicted for i in items),
        "staleness_max": float(ages.max()),
        "staleness_mean": float(ages.mean()),
    }


@dataclass(frozen=True)
class Gap:
    """Largest |engine - trainer| logprob (nats) of the same weights, and on how many tokens it was taken."""

    value: float
    tokens: int


def check_gap(work: TrainBatch, proximal: Sequence[np.ndarray], bound: float) -> Gap:
    """Compare on the tokens that the trainer's own version sampled.

    proximal: per item [n] logprobs under the trainer's current weights. Raises TrainerError past `bound`
    (a gap that is not a number is past every bound).
    """
    worst, count = 0.0, 0
    where: tuple[int, int] | None = None
    for i, (item, ours) in enumerate(zip(work.items, proximal, strict=True)):
        same = item.columns["version"] == work.version
        count += int(same.sum())
        gap = np.where(same, np.abs(item.columns["behaviour"] - ours), 0.0)
        gap = np.where(np.isnan(gap), np.inf, gap)
        at = int(gap.argmax())
        if gap[at] > worst:
            worst, where = float(gap[at]), (i, at)
    if worst > bound and where is not None:
        i, at = where
        item, sequence = work.items[i], work.batch.sequences[work.sources[i]]
        token = int(np.flatnonzero(item.loss_mask)[at])
        raise TrainerError(
            f"engine and trainer disagree by {worst:.3g} nats (logprob_gap_bound = {bound:g}) under the same "
            f"weights, version {work.version}: sequence {work.sources[i]} (session {sequence.session_id}), "
            f"token {token} (id {item.token_ids[token]}): engine {item.columns['behaviour'][at]:.6g}, trainer "
            f"{proximal[i][at]:.6g}. Either the engines do not hold the weights that were sent, or the compute "
            "dtypes differ: compare fleet.dtype with trainer.compute_dtype"
        )
    return Gap(worst, count)
