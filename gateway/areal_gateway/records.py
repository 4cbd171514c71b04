"""What the ledger keeps: immutable records, one per fact.

Invariant: a record is never changed after it was written. What changes (delivered, sealed, leased,
acked) is a further record, and the current picture is a fold over all of them.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Span = tuple[int, int, int]
"""(start, end, version): output tokens [start, end) were sampled under that policy version."""


class CallState(StrEnum):
    """How a call ended. Each call ends in exactly one of these."""

    COMPLETE = "complete"
    """The model ended its reply itself; ids, logprobs and versions are all there."""
    TRUNCATED = "truncated"
    """The token limit ended the reply; ids, logprobs and versions are all there. It is trained."""
    ABORTED = "aborted"
    """The client left, the session was sealed, or a deadline passed, before the reply ended."""
    INCOMPLETE = "incomplete"
    """The reply was given, but a logprob or a version is missing: it is context, never trained."""
    CONSTRAINED = "constrained"
    """The reply was given, sampled under a grammar (a JSON format, a forced tool) or, where requests choose, from
    a distribution that the trainer does not compute (greedy, top_p, top_k): it is context, never trained."""
    FAILED = "failed"
    """No engine gave a whole reply; the client got an error."""


REPLIED = frozenset({CallState.COMPLETE, CallState.TRUNCATED, CallState.INCOMPLETE, CallState.CONSTRAINED})
"""States in which the client was given a reply, so that a later call may continue it."""

EXACT = frozenset({CallState.COMPLETE, CallState.TRUNCATED})
"""States in which every sampled token has its logprob and its version."""


class Outcome(StrEnum):
    """Why a session was sealed."""

    FINISHED = "finished"
    """The agent returned."""
    FAILED = "failed"
    """The agent raised."""
    TIMEOUT = "timeout"
    """The agent did not return in time, or nobody sealed the session before its deadline."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a session's calls are sampled, resolved once when it opens. `max_tokens` None: no cap."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as it was opened. `admitted` is its place in the order of admission (from 0)."""

    session_id: str
    key_hash: bytes
    task_id: str
    group_id: str
    group_size: int
    purpose: str
    sampling: Sampling
    deadline_s: float
    labels: dict[str, str]
    opened_version: int
    opened_at: float
    admitted: int


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call, as it ended.

    Attributes:
        exchange_id: the client's request; the `n` sibling calls of one request share it.
        index: which of the siblings.
        parent_id: the call whose conversation this one extends, None for a root.
        cause: why a root is one (`root`, `edited`, ...); None when it extends its parent.
        reason: what went wrong, for states other than complete and truncated.
        finish_reason: as the client was told it; None when no reply was given.
        digest: of dialect and request body, to recognise a retry.
        retry_key: the client's Idempotency-Key.
        messages: the request's messages beyond the parent's conversation (all of them for a root).
        tools: the request's tools.
        reply: the assistant message exactly as it was returned, None when none was.
        shared: tokens of the prompt that are the parent's prompt and output.
        suffix_ids: the prompt's tokens after those.
        output_ids: [n] sampled ids. logprobs: [n], NaN where the engine gave none. spans: over [0, n).
        temperature, max_tokens, seed: what the engine was asked for.
    """

    call_id: str
    session_id: str
    exchange_id: str
    index: int
    parent_id: str | None
    cause: str | None
    state: CallState
    reason: str | None
    finish_reason: str | None
    dialect: str
    digest: bytes
    retry_key: str | None
    labels: dict[str, str]
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    reply: dict[str, Any] | None
    shared: int
    suffix_ids: array[int]
    output_ids: array[int]
    logprobs: array[float]
    spans: tuple[Span, ...]
    temperature: float
    max_tokens: int
    seed: int | None
    started_at: float
    ended_at: float

    @property
    def prompt_length(self) -> int:
        return self.shared + len(self.suffix_ids)

    @property
    def versions(self) -> frozenset[int]:
        return frozenset(version for _, _, version in self.spans)


@dataclass(frozen=True, slots=True)
class RewardRecord:
    """A verdict on a session, on one of its calls (`call_id`), or on its calls that carry `labels`.

    `value` None says missing, which is not 0.
    """

    session_id: str
    key: str
    name: str
    value: float | None
    call_id: str | None
    at: float
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def about_session(self) -> bool:
        return self.call_id is None and not self.labels


@dataclass(frozen=True, slots=True)
class SealRecord:
    """The end of a session, with what its fold gave at that moment (nothing can change it later).

    `oldest_version` is that of the oldest trained token, None when nothing is trained.
    `multi_version_calls` counts trained calls that were sampled under more than one version.
    """

    session_id: str
    outcome: Outcome
    error: str | None
    reward: float | None
    trained_tokens: int
    oldest_version: int | None
    multi_version_calls: int
    at: float


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """Groups handed to the trainer until `expires_at` (seconds since 1970)."""

    lease_id: str
    version: int
    group_ids: tuple[str, ...]
    expires_at: float
    at: float


class LeaseEnd(StrEnum):
    """How a lease ended."""

    ACK = "ack"
    """Its groups were trained; they are consumed."""
    NACK = "nack"
    """The trainer gave them back."""
    EXPIRED = "expired"
    """Neither came in time; the groups are back."""
    REWOUND = "rewound"
    """The trainer resumed from before it: the batch is leased again. Follows from a rewind; never stored."""


@dataclass(frozen=True, slots=True)
class SessionHistory:
    """Everything the ledger holds of one session, in the order it was written."""

    session: SessionRecord
    calls: list[CallRecord] = field(default_factory=list)
    delivered: set[str] = field(default_factory=set)
    rewards: list[RewardRecord] = field(default_factory=list)
    seal: SealRecord | None = None


def ints(values: Any) -> array[int]:
    """Token ids -> int32 array, the form records hold them in."""
    return array("i", values)


def floats(values: Any) -> array[float]:
    """Logprobs -> float32 array; None becomes NaN, so that positions never shift."""
    try:
        return array("f", values)
    except TypeError:  # a None among them
        return array("f", [math.nan if v is None else v for v in values])
