"""The ledger's tables. Invariant: every table has triggers that refuse UPDATE and DELETE.

Blobs are little-endian int32 (ids) and float32 (logprobs); JSON is UTF-8. A change here raises
SCHEMA_VERSION and adds a migration; an older program refuses a newer file instead of misreading it.
"""

from __future__ import annotations

from collections.abc import Iterable

SCHEMA_VERSION = 2

NO_ORPHANS = (
    "CREATE TRIGGER calls_have_parents BEFORE INSERT ON calls WHEN NEW.parent_id IS NOT NULL "
    "AND NOT EXISTS (SELECT 1 FROM calls WHERE call_id = NEW.parent_id) "
    "BEGIN SELECT RAISE(ABORT, 'the call that this one continues was never written'); END;"
)
"""A call whose parent could not be written would lack the tokens that it begins with."""

_COLUMNS = {
    "sessions": """
        session_id TEXT PRIMARY KEY, key_hash BLOB NOT NULL UNIQUE, task_id TEXT NOT NULL,
        group_id TEXT NOT NULL, group_size INTEGER NOT NULL, purpose TEXT NOT NULL, sampling BLOB NOT NULL,
        deadline_s REAL NOT NULL, labels BLOB NOT NULL, opened_version INTEGER NOT NULL,
        opened_at REAL NOT NULL, admitted INTEGER NOT NULL UNIQUE""",
    "calls": """
        seq INTEGER PRIMARY KEY, call_id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL,
        exchange_id TEXT NOT NULL, choice INTEGER NOT NULL, parent_id TEXT, cause TEXT, state TEXT NOT NULL,
        reason TEXT, finish_reason TEXT, dialect TEXT NOT NULL, digest BLOB NOT NULL, retry_key TEXT,
        labels BLOB NOT NULL, messages BLOB NOT NULL, tools_key BLOB NOT NULL, reply BLOB,
        shared INTEGER NOT NULL, suffix_ids BLOB NOT NULL, output_ids BLOB NOT NULL, logprobs BLOB NOT NULL,
        spans BLOB NOT NULL, temperature REAL NOT NULL, max_tokens INTEGER NOT NULL, seed INTEGER,
        started_at REAL NOT NULL, ended_at REAL NOT NULL""",
    "tool_lists": "tools_key BLOB PRIMARY KEY, tools BLOB NOT NULL",
    "deliveries": "call_id TEXT PRIMARY KEY, at REAL NOT NULL",
    "rewards": """
        seq INTEGER PRIMARY KEY, session_id TEXT NOT NULL, key TEXT NOT NULL, name TEXT NOT NULL,
        value REAL, call_id TEXT, at REAL NOT NULL, labels BLOB""",
    "seals": """
        session_id TEXT PRIMARY KEY, outcome TEXT NOT NULL, error TEXT, reward REAL,
        trained_tokens INTEGER NOT NULL, oldest_version INTEGER, multi_version_calls INTEGER NOT NULL,
        at REAL NOT NULL""",
    "leases": "lease_id TEXT PRIMARY KEY, version INTEGER NOT NULL, expires_at REAL NOT NULL, at REAL NOT NULL",
    "lease_groups": "lease_id TEXT NOT NULL, group_id TEXT NOT NULL",
    "lease_ends": "lease_id TEXT PRIMARY KEY, kind TEXT NOT NULL, at REAL NOT NULL",
    "rewinds": "seq INTEGER PRIMARY KEY, version INTEGER NOT NULL, leases INTEGER NOT NULL, at REAL NOT NULL",
    "voids": "group_id TEXT PRIMARY KEY, why TEXT NOT NULL, at REAL NOT NULL",
}

TABLES = tuple(_COLUMNS)


def _create(tables: Iterable[str]) -> str:
    return "".join(
        f"CREATE TABLE {name} ({_COLUMNS[name]});"
        + "".join(
            f"CREATE TRIGGER {name}_no_{verb.lower()} BEFORE {verb} ON {name} "
            "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;"
            for verb in ("UPDATE", "DELETE")
        )
        for name in tables
    )


SCHEMA = _create(TABLES) + (
    "CREATE INDEX calls_by_session ON calls (session_id);"
    "CREATE INDEX rewards_by_session ON rewards (session_id);"
    "CREATE INDEX sessions_by_group ON sessions (group_id);" + NO_ORPHANS
)


_MIGRATIONS = {1: "ALTER TABLE rewards ADD COLUMN labels BLOB;" + NO_ORPHANS + _create(("rewinds", "voids"))}
"""From a version to the next. Only additions: rows that are there stay as they were written."""


def upgrade(found: int) -> str:
    """Statements that bring a file of version `found` to SCHEMA_VERSION."""
    return "".join(_MIGRATIONS[v] for v in range(found, SCHEMA_VERSION)) if found else SCHEMA
