"""Random ragged batches for the algorithm's tests: groups of several sizes, singletons, sessions with several
branches, missing rewards, sessions that sampled nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from areal_agent.config import AlgorithmConfig
from areal_agent.trajectory import Batch, Sequence
from areal_trainers.algorithm.experience import Experience, complete
from areal_trainers.algorithm.loss import policy_loss
from areal_trainers.batch import TrainBatch, prepare

VERSION = 4


@dataclass
class Row:
    """A sequence with n trained tokens; every array is [n]."""

    group: str
    session: str
    reward: float | None
    turns: np.ndarray
    versions: np.ndarray
    logp: np.ndarray
    prox: np.ndarray
    behave: np.ndarray
    ref: np.ndarray
    value: np.ndarray
    entropy: np.ndarray

    @property
    def n(self) -> int:
        return len(self.logp)


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """At least one session has a reward and a trained token."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rewards = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 0.1, -0.5]))
    sessions = st.tuples(rewards, st.lists(st.integers(0, 6), min_size=1, max_size=3))
    groups = draw(st.lists(st.lists(sessions, min_size=1, max_size=3), min_size=1, max_size=2))
    groups.append([(1.0, [3]), (0.0, [2, 5])])
    return make_rows(groups, rng)


def make_rows(groups: list[list[tuple[float | None, list[int]]]], rng: np.random.Generator) -> list[Row]:
    """groups of (reward, tokens of each branch)."""
    out = []
    for g, members in enumerate(groups):
        for s, (reward, branches) in enumerate(members):
            for n in branches:
                logp = -rng.exponential(1.5, n)
                prox = logp + rng.normal(0, 0.25, n)
                out.append(
                    Row(
                        group=f"g{g}",
                        session=f"g{g}s{s}",
                        reward=reward,
                        turns=np.cumsum(rng.random(n) < 0.4) if n else np.zeros(0, int),
                        versions=rng.integers(VERSION - 3, VERSION + 1, n),
                        logp=logp,
                        prox=prox,
                        behave=prox + rng.normal(0, 0.4, n),
                        ref=logp + rng.normal(0, 0.5, n),
                        value=rng.normal(0, 1, n),
                        entropy=rng.exponential(1.0, n),
                    )
                )
    return out


def leased(all_rows: list[Row]) -> Batch:
    """Two prompt tokens, then the trained ones with a tool token between turns."""
    sequences = []
    for row in all_rows:
        logprobs, versions, mask = [0.0, 0.0], [-1, -1], [False, False]
        for t in range(row.n):
            if t and row.turns[t] != row.turns[t - 1]:
                logprobs, versions, mask = [*logprobs, 0.0], [*versions, -1], [*mask, False]
            logprobs.append(float(row.behave[t]))
            versions.append(int(row.versions[t]))
            mask.append(True)
        sequences.append(
            Sequence(
                token_ids=[1] * len(mask),
                logprobs=logprobs,
                versions=versions,
                loss_mask=mask,
                temperature=1.0,
                reward=row.reward,
                session_id=row.session,
                group_id=row.group,
                task_id=row.group,
            )
        )
    return Batch("lease", VERSION, tuple(sequences))


def experience_of(
    algorithm: AlgorithmConfig, all_rows: list[Row]
) -> tuple[TrainBatch, Experience, list[Row]]:
    """(batch, its completed items, the rows they come from)."""
    work = prepare(
        leased(all_rows), version=VERSION, max_staleness=9, dynamic_sampling=algorithm.dynamic_sampling
    )
    kept = [all_rows[i] for i in work.sources]
    experience = complete(
        work,
        algorithm,
        proximal=[r.prox for r in kept] if algorithm.proximal == "recompute" else None,
        reference=[r.ref for r in kept] if algorithm.needs_reference else None,
        values=[r.value for r in kept] if algorithm.needs_critic else None,
    )
    return work, experience, kept


def loss_and_gradient(
    algorithm: AlgorithmConfig, all_rows: list[Row]
) -> tuple[float, np.ndarray, np.ndarray, list[Row]]:
    """(loss, gradient by logprobs, gradient by entropies, rows trained), through the code under test."""
    _, experience, kept = experience_of(algorithm, all_rows)
    if not kept:
        return 0.0, np.zeros(0), np.zeros(0), kept
    logp = torch.tensor(np.concatenate([r.logp for r in kept]), requires_grad=True)
    entropy = torch.tensor(np.concatenate([r.entropy for r in kept]), requires_grad=True)
    columns = {
        name: torch.tensor(np.concatenate([i.columns[name] for i in experience.items]))
        for name in experience.items[0].columns
    }
    index = torch.tensor(np.repeat(np.arange(len(kept)), [r.n for r in kept]))
    sums = policy_loss(algorithm, logp, entropy, columns, index)
    loss = sums.loss / float(columns["share"].sum())
    loss.backward()
    by_entropy = np.zeros(len(entropy)) if entropy.grad is None else entropy.grad.numpy()
    return float(loss.detach()), logp.grad.numpy(), by_entropy, kept  # type: ignore[union-attr]
