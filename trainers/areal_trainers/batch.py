"""A leased batch as the learner's items: staleness checked, what does not train left out, gap checked.

Invariant: an item exists for every sequence that carries loss and whose session has a reward (and, with
dynamic sampling, whose group's rewards differ); its columns have one value per predicted token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_agent.errors import TrainerError
from areal_agent.trajectory import Batch
from areal_trainers.algorithm.rewards import equal_groups
from areal_trainers.packing import Item


@dataclass(frozen=True)
class TrainBatch:
    """What one step trains on.

    Attributes:
        version: policy version of trainer and fleet.
        items: columns `behaviour` (engine logprob) and `version`, per predicted token.
        sources: index into the leased batch's sequences, per item.
        batch: as leased.
        rewards: session -> reward, None when missing; of every session leased, trained or not.
        groups: session -> group.
        session_tokens: session -> tokens sampled in it and trained, over all its sequences.
        metrics: numbers of the batch itself.
    """

    version: int
    items: tuple[Item, ...]
    sources: tuple[int, ...]
    batch: Batch
    rewards: dict[str, float | None]
    groups: dict[str, str]
    session_tokens: dict[str, int]
    metrics: dict[str, float]

    @property
    def tokens(self) -> int:
        """Predicted tokens."""
        return sum(i.predicted for i in self.items)

    def session(self, item: int) -> str:
        """The session that an item is a sequence of."""
        return self.batch.sequences[self.sources[item]].session_id


def prepare(batch: Batch, *, version: int, max_staleness: int, dynamic_sampling: bool = False) -> TrainBatch:
    """Leased batch -> items.

    dynamic_sampling: leave out groups whose rewards are all equal. When that is all of them there are no
    items, and the step changes nothing but the version.

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
    flat = equal_groups(rewards, groups)
    items, sources, dropped = [], [], 0
    session_tokens: Counter[str] = Counter()
    for index, s in enumerate(batch.sequences):
        mask = np.asarray(s.loss_mask, bool)
        session_tokens[s.session_id] += int(mask.sum())
        if not mask.any() or s.reward is None:
            continue
        if dynamic_sampling and s.group_id in flat:
            dropped += 1
            continue
        if mask[0]:
            raise TrainerError(f"session {s.session_id} trains its first token, which nothing precedes")
        items.append(
            Item(
                token_ids=np.asarray(s.token_ids, np.int64),
                loss_mask=mask,
                temperature=s.temperature,
                columns={
                    "behaviour": np.asarray(s.logprobs, np.float64)[mask],
                    "version": np.asarray(s.versions, np.float64)[mask],
                },
            )
        )
        sources.append(index)
    if not items and not dropped:
        raise TrainerError(f"lease {batch.lease_id} has no trained token with a reward; nothing to train on")
    metrics = _metrics(batch, items, rewards, groups, flat)
    metrics["groups_dropped"] = len(flat) if dynamic_sampling else 0
    return TrainBatch(
        version, tuple(items), tuple(sources), batch, rewards, groups, dict(session_tokens), metrics
    )


def _metrics(
    batch: Batch,
    items: Sequence[Item],
    rewards: dict[str, float | None],
    groups: dict[str, str],
    flat: set[str],
) -> dict[str, float]:
    known = np.array([r for r in rewards.values() if r is not None])
    ages = batch.version - np.concatenate([[batch.version], *(i.columns["version"] for i in items)])
    return {
        "reward_mean": float(known.mean()),
        "reward_std": float(known.std()),
        "sessions": len(rewards),
        "rewards_missing": len(rewards) - len(known),
        "groups": len(set(groups.values())),
        "groups_zero_advantage": len(flat) / len(set(groups.values())),
        "sequences": len(items),
        "tokens": sum(map(len, items)),
        "trained_tokens": sum(i.predicted for i in items),
        "staleness_max": float(ages.max()),
        "staleness_mean": float(ages[1:].mean()) if items else 0.0,
    }


@dataclass(frozen=True)
class Gap:
    """Largest |engine - trainer| logprob (nats) of the same weights, and on how many tokens it was taken."""

    value: float
    tokens: int


def check_gap(work: TrainBatch, proximal: Sequence[np.ndarray] | None, bound: float) -> Gap:
    """Compare on the tokens that the trainer's own version sampled.

    proximal: per item [n] logprobs under the trainer's current weights; None where none were computed, which
    leaves the comparison to the probe. Raises TrainerError past `bound`
    (a gap that is not a number is past every bound).
    """
    if proximal is None:
        return Gap(0.0, 0)
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
