"""What the trainer gets of a session, and what everyone else means by it.

Invariant: a sequence's four columns have equal length, and every token with `loss_mask` set has a
finite logprob and the version that sampled it (>= 0). Tokens that were not sampled, and sampled ones
that another sequence already trains, carry no loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

NOT_SAMPLED = -1
"""The version of a token that came from a prompt."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """One branch of a session's call tree, root to leaf, as tokens (L of them).

    Attributes:
        token_ids: [L] int, prompt and sampled tokens in the order the engine saw them.
        logprobs: [L] float, natural log, of the distribution sampled from; 0.0 where not sampled.
        versions: [L] int, policy version that sampled each token; NOT_SAMPLED for prompt tokens.
        loss_mask: [L] bool, the tokens this sequence trains.
        temperature: softmax temperature of the sampling distribution (> 0).
        reward: the session's reward; None when it is missing (which is not 0).
        session_id, group_id, task_id: where it comes from; GRPO compares within a group_id.
        call_ids: the calls on the branch, root first (C of them).
        call_ends: [C] int, where each call's sampled tokens end: token `call_ends[i] - 1` is its last one.
        call_rewards: [C] float or None, what was given to the call itself; None: nothing.
        call_returns: [C] float or None, the call's own reward + `rewards.turn_discount` × the mean return of
            the calls that continue it, the session's own reward being earned at the end of every branch.
            Without rewards of single calls and with a discount of 1 all are `reward`.
        call_labels: [C] the labels each call carried.
    """

    token_ids: Seq[int]
    logprobs: Seq[float]
    versions: Seq[int]
    loss_mask: Seq[bool]
    temperature: float
    reward: float | None
    session_id: str
    group_id: str
    task_id: str
    call_ids: Seq[str] = ()
    call_ends: Seq[int] = ()
    call_rewards: Seq[float | None] = ()
    call_returns: Seq[float | None] = ()
    call_labels: Seq[Mapping[str, str]] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.versions), len(self.loss_mask)}
        if len(lengths) != 1:
            raise ValueError(f"columns of session {self.session_id} differ in length: {sorted(lengths)}")
        for i, trained in enumerate(self.loss_mask):
            if trained and (self.versions[i] < 0 or not math.isfinite(self.logprobs[i])):
                raise ValueError(
                    f"token {i} of session {self.session_id} carries loss but has version "
                    f"{self.versions[i]} and logprob {self.logprobs[i]}"
                )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def trained_tokens(self) -> int:
        return sum(self.loss_mask)

    def oldest_version(self) -> int | None:
        """Version of the oldest trained token; None when nothing is trained."""
        return min((v for v, m in zip(self.versions, self.loss_mask, strict=True) if m), default=None)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """All branches of one session. `reward` is None when missing."""

    session_id: str
    group_id: str
    task_id: str
    reward: float | None
    sequences: tuple[Sequence, ...]

    @property
    def trained_tokens(self) -> int:
        return sum(s.trained_tokens for s in self.sequences)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one lease holds: whole groups, so that a group is never compared in part.

    Attributes:
        lease_id: to ack or nack it with.
        version: the fleet's committed version when it was leased.
        sequences: every branch of every session in it.
    """

    lease_id: str
    version: int
    sequences: tuple[Sequence, ...] = field(default_factory=tuple)

    def staleness(self) -> int:
        """Current version minus the version of the oldest trained token (0 for an empty batch)."""
        oldest = [v for s in self.sequences if (v := s.oldest_version()) is not None]
        return self.version - min(oldest) if oldest else 0
