"""Records as rows of the ledger and back. Invariant: what is read is equal to what was written."""

from __future__ import annotations

from array import array
from dataclasses import asdict
from typing import Any

import orjson

from areal_gateway.canonical import tools_key
from areal_gateway.records import (
    CallRecord,
    CallState,
    LeaseEnd,
    LeaseRecord,
    Outcome,
    RewardRecord,
    Sampling,
    SealRecord,
    SessionRecord,
)

Row = tuple[str, tuple[Any, ...]]
"""A statement and its values."""


CALL_COLUMNS = (
    "call_id, session_id, exchange_id, choice, parent_id, cause, state, reason, finish_reason, dialect, "
    "digest, retry_key, labels, messages, tools_key, reply, shared, suffix_ids, output_ids, logprobs, spans, "
    "temperature, max_tokens, seed, started_at, ended_at"
)


def session_row(s: SessionRecord) -> Row:
    return (
        "INSERT INTO sessions VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
        (
            s.session_id,
            s.key_hash,
            s.task_id,
            s.group_id,
            s.group_size,
            s.purpose,
            _json(asdict(s.sampling)),
            s.deadline_s,
            _json(s.labels),
            s.opened_version,
            s.opened_at,
            s.admitted,
        ),
    )


def call_rows(c: CallRecord, *, tools_written: bool = False) -> list[Row]:
    """The call, and its list of tools where no earlier call had the same.

    `tools_written`: its parent has the same, so that it is there if the parent is, without which the call
    could not be written either.
    """
    key = tools_key(c.tools)
    row = _call_row(c, key)
    if tools_written:
        return [row]
    return [("INSERT OR IGNORE INTO tool_lists VALUES (?,?)", (key, _json(c.tools))), row]


def _call_row(c: CallRecord, key: bytes) -> Row:
    return (
        f"INSERT INTO calls ({CALL_COLUMNS}) VALUES ({','.join('?' * 26)})",
        (
            c.call_id,
            c.session_id,
            c.exchange_id,
            c.index,
            c.parent_id,
            c.cause,
            c.state.value,
            c.reason,
            c.finish_reason,
            c.dialect,
            c.digest,
            c.retry_key,
            _json(c.labels),
            _json(c.messages),
            key,
            None if c.reply is None else _json(c.reply),
            c.shared,
            c.suffix_ids.tobytes(),
            c.output_ids.tobytes(),
            c.logprobs.tobytes(),
            _json(c.spans),
            c.temperature,
            c.max_tokens,
            c.seed,
            c.started_at,
            c.ended_at,
        ),
    )


def delivery_row(call_id: str, at: float) -> Row:
    """A second delivery of the same call (a replay) is no new fact."""
    return "INSERT OR IGNORE INTO deliveries VALUES (?,?)", (call_id, at)


def reward_row(r: RewardRecord) -> Row:
    return (
        "INSERT INTO rewards (session_id, key, name, value, call_id, at, labels) VALUES (?,?,?,?,?,?,?)",
        (r.session_id, r.key, r.name, r.value, r.call_id, r.at, _json(r.labels) if r.labels else None),
    )


def seal_row(s: SealRecord) -> Row:
    return (
        "INSERT INTO seals VALUES (?,?,?,?,?,?,?,?)",
        (
            s.session_id,
            s.outcome.value,
            s.error,
            s.reward,
            s.trained_tokens,
            s.oldest_version,
            s.multi_version_calls,
            s.at,
        ),
    )


def lease_rows(lease: LeaseRecord) -> list[Row]:
    head: Row = (
        "INSERT INTO leases VALUES (?,?,?,?)",
        (lease.lease_id, lease.version, lease.expires_at, lease.at),
    )
    return [
        head,
        *(("INSERT INTO lease_groups VALUES (?,?)", (lease.lease_id, g)) for g in lease.group_ids),
    ]


def lease_end_row(lease_id: str, kind: LeaseEnd, at: float) -> Row:
    """A lease ends once: a repeated ack is no new fact."""
    return "INSERT OR IGNORE INTO lease_ends VALUES (?,?,?)", (lease_id, kind.value, at)


def rewind_row(version: int, at: float) -> Row:
    """`leases`: how many there were, so that the fold knows which of them it undid."""
    return (
        "INSERT INTO rewinds (version, leases, at) VALUES (?, (SELECT COUNT(*) FROM leases), ?)",
        (version, at),
    )


def void_row(group_id: str, why: str, at: float) -> Row:
    """A group given up by hand; one that is void by its rewards needs no row."""
    return "INSERT OR IGNORE INTO voids VALUES (?,?,?)", (group_id, why, at)


def _json(value: Any) -> bytes:
    return orjson.dumps(value)


def read_session(row: tuple[Any, ...]) -> SessionRecord:
    r = list(row)
    r[6], r[8] = Sampling(**orjson.loads(r[6])), orjson.loads(r[8])
    return SessionRecord(*r)


def read_seal(row: tuple[Any, ...]) -> SealRecord:
    return SealRecord(row[0], Outcome(row[1]), *row[2:])


def read_reward(row: tuple[Any, ...]) -> RewardRecord:
    return RewardRecord(*row[:6], labels=orjson.loads(row[6]) if row[6] else {})


def read_call(row: tuple[Any, ...], tool_lists: dict[bytes, list[Any]]) -> CallRecord:
    r = list(row)
    r[6] = CallState(r[6])
    for i in (12, 13):
        r[i] = orjson.loads(r[i])
    r[14] = tool_lists[r[14]]
    r[15] = None if r[15] is None else orjson.loads(r[15])
    r[17], r[18], r[19] = array("i", r[17]), array("i", r[18]), array("f", r[19])
    r[20] = tuple((int(a), int(b), int(v)) for a, b, v in orjson.loads(r[20]))
    return CallRecord(*r)
