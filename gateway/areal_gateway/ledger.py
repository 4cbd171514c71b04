"""The ledger: an append-only SQLite file that everything else is a fold over.

Invariant: no row is ever changed or removed (triggers forbid it), and what `append` awaited is committed.
The file is write-ahead logged: a committed row survives a killed process, and the file is whole after a power
cut, which may cost its last moments; with `sync="full"` every commit is flushed to the disk, and nothing is
lost then either. How rows are written is in writer.py; this file opens it and reads it.

Session keys are stored as SHA-256 only. They are random 192-bit strings, so a plain hash cannot be
guessed backwards, and a ledger that is copied or exported gives nobody a live key.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import orjson

from areal_agent.errors import ConfigError
from areal_gateway.records import (
    LeaseEnd,
    LeaseRecord,
    SealRecord,
    SessionHistory,
    SessionRecord,
)
from areal_gateway.rows import CALL_COLUMNS, Row, read_call, read_reward, read_seal, read_session
from areal_gateway.schema import SCHEMA_VERSION, upgrade
from areal_gateway.writer import BUSY_S, LedgerError, LedgerWriter

log = logging.getLogger(__name__)

PAGE_BYTES = 1024
"""A call's row is 1 to 20 kB, and SQLite leaves the rest of a row's last page empty: with its 4 kB pages, rows
of 2.7 kB cost 1.57 times their bytes, with these 1.18 times. Files made before keep theirs."""


class Ledger:
    """One open ledger file. Append from the event loop; read from any thread."""

    def __init__(self, path: str | Path, sync: Literal["normal", "full"] = "normal") -> None:
        """Open or create the file. Raises ConfigError when it is in use, damaged, or of a newer version."""
        self.path = Path(path)
        self._lock_file = _lock(self.path)
        try:
            db = _connect(self.path)
            _prepare(db, self.path, sync)
            self._reader = _connect(self.path)
            self._reader.execute("PRAGMA query_only = ON")
        except BaseException:
            self._lock_file.close()
            raise
        self._reading = threading.Lock()
        self._writer = LedgerWriter(db, flushed=sync == "full")

    # -- writing ----------------------------------------------------------------------------------

    def append(self, *rows: Row) -> asyncio.Future[None]:
        """Queue rows, all or none; the future resolves once they are durable, or raises LedgerError.

        Rows are written in the order of the calls. Not awaiting the future is allowed; a failure is then
        logged. Where nobody will ever wait, `note` is cheaper.
        """
        return self._writer.append(*rows)

    def note(self, *rows: Row) -> None:
        """As `append`, for rows that nobody waits for: the event loop is not woken. A failure is logged."""
        self._writer.note(*rows)

    def close(self) -> None:
        """Write what is queued, then close. Further appends raise."""
        self._writer.close()
        with self._reading:
            self._reader.close()
        self._lock_file.close()

    # -- reading: call from a worker thread, or at start -------------------------------------------

    def _select(self, sql: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        with self._reading:
            try:
                return self._reader.execute(sql, tuple(values)).fetchall()
            except sqlite3.Error as e:
                raise LedgerError(f"cannot read the ledger: {e}") from e

    def sessions(
        self, group_ids: Iterable[str] | None = None
    ) -> list[tuple[SessionRecord, SealRecord | None]]:
        """Every session (of these groups) with its seal, in the order of admission."""
        if group_ids is None:
            seals = self._select("SELECT * FROM seals")
            rows = self._select("SELECT * FROM sessions ORDER BY admitted")
        else:
            named = (orjson.dumps(list(group_ids)).decode(),)
            of = "FROM sessions WHERE group_id IN (SELECT value FROM json_each(?))"
            seals = self._select(f"SELECT * FROM seals WHERE session_id IN (SELECT session_id {of})", named)
            rows = self._select(f"SELECT * {of} ORDER BY admitted", named)
        by_session = {seal.session_id: seal for seal in map(read_seal, seals)}
        return [(s, by_session.get(s.session_id)) for s in map(read_session, rows)]

    def session_id_of_key(self, key_hash: bytes) -> str | None:
        rows = self._select("SELECT session_id FROM sessions WHERE key_hash = ?", (key_hash,))
        return rows[0][0] if rows else None

    def session_of_exchange(self, exchange_id: str, task_prefix: str) -> str | None:
        """The session of a reply, among those whose task id begins with `task_prefix`. Reads every call."""
        rows = self._select(
            "SELECT c.session_id FROM calls c JOIN sessions s ON s.session_id = c.session_id "
            "WHERE (c.exchange_id = ? OR c.call_id = ?) AND substr(s.task_id, 1, ?) = ?",
            (exchange_id, exchange_id, len(task_prefix), task_prefix),
        )
        return rows[0][0] if rows else None

    def latest_session_of_task(self, task_id: str) -> str | None:
        rows = self._select(
            "SELECT session_id FROM sessions WHERE task_id = ? ORDER BY admitted DESC LIMIT 1", (task_id,)
        )
        return rows[0][0] if rows else None

    def histories(self, session_ids: Iterable[str]) -> dict[str, SessionHistory]:
        """Everything about these sessions; unknown ids are left out."""
        out: dict[str, SessionHistory] = {}
        tool_lists = {k: orjson.loads(v) for k, v in self._select("SELECT * FROM tool_lists")}
        for session_id in session_ids:
            rows = self._select("SELECT * FROM sessions WHERE session_id = ?", (session_id,))
            if not rows:
                continue
            one = (session_id,)
            seals = self._select("SELECT * FROM seals WHERE session_id = ?", one)
            out[session_id] = SessionHistory(
                session=read_session(rows[0]),
                calls=[
                    read_call(r, tool_lists)
                    for r in self._select(
                        f"SELECT {CALL_COLUMNS} FROM calls WHERE session_id = ? ORDER BY seq", one
                    )
                ],
                delivered={
                    r[0]
                    for r in self._select(
                        "SELECT d.call_id FROM deliveries d JOIN calls c ON c.call_id = d.call_id "
                        "WHERE c.session_id = ?",
                        one,
                    )
                },
                rewards=[
                    read_reward(r)
                    for r in self._select(
                        "SELECT session_id, key, name, value, call_id, at, labels FROM rewards "
                        "WHERE session_id = ? ORDER BY seq",
                        one,
                    )
                ],
                seal=read_seal(seals[0]) if seals else None,
            )
        return out

    def call_totals(self) -> tuple[dict[str, int], int]:
        """Calls by state, and tokens sampled, over the whole file."""
        rows = self._select("SELECT state, COUNT(*), SUM(LENGTH(output_ids)) FROM calls GROUP BY state")
        return {r[0]: r[1] for r in rows}, sum(r[2] or 0 for r in rows) // 4

    def leases(self) -> list[tuple[LeaseRecord, LeaseEnd | None]]:
        """Every lease with how it ended, oldest first."""
        groups: dict[str, list[str]] = {}
        for lease_id, group_id in self._select("SELECT lease_id, group_id FROM lease_groups ORDER BY rowid"):
            groups.setdefault(lease_id, []).append(group_id)
        rows = self._select(
            "SELECT l.lease_id, l.version, l.expires_at, l.at, e.kind FROM leases l "
            "LEFT JOIN lease_ends e ON e.lease_id = l.lease_id ORDER BY l.rowid"
        )
        return [
            (
                LeaseRecord(lease_id, version, tuple(groups.get(lease_id, ())), expires_at, at),
                LeaseEnd(kind) if kind else None,
            )
            for lease_id, version, expires_at, at, kind in rows
        ]

    def rewinds(self) -> list[tuple[int, int]]:
        """(version, leases there were by then) of every rewind, oldest first."""
        return [(v, n) for v, n in self._select("SELECT version, leases FROM rewinds ORDER BY seq")]

    def voids(self) -> dict[str, str]:
        """Groups given up by hand, and why."""
        return dict(self._select("SELECT group_id, why FROM voids"))  # type: ignore[arg-type]


# -- the file --------------------------------------------------------------------------------------


def _lock(path: Path) -> Any:
    """An exclusive lock beside the file: two gateways must never fold and append to one ledger."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open(path.with_name(path.name + ".lock"), "w")  # noqa: SIM115 (held until close)
    except OSError as e:
        raise ConfigError(f"cannot create the ledger {path}: {e}") from e
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise ConfigError(
            f"the ledger {path} is in use by another gateway; stop that one, or choose another run folder"
        ) from None
    return handle


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
    db.execute("PRAGMA recursive_triggers = ON")  # so that INSERT OR REPLACE meets the delete trigger too
    return db


def _prepare(db: sqlite3.Connection, path: Path, sync: str) -> None:
    try:
        (found,) = db.execute("PRAGMA user_version").fetchone()
        if found > SCHEMA_VERSION:
            raise ConfigError(
                f"the ledger {path} has schema {found}, written by a newer areal-agent; this one reads up to "
                f"{SCHEMA_VERSION}: use that version, or another run folder"
            )
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {sync.upper()}")
        if found == 0:
            others = db.execute("SELECT name FROM sqlite_master").fetchall()
            if others:
                raise ConfigError(
                    f"{path} is an SQLite file, but no ledger of areal-agent; name another file"
                )
        if found < SCHEMA_VERSION:
            db.executescript(f"BEGIN; {upgrade(found)} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            if found:
                log.info("ledger %s: schema %d brought to %d", path, found, SCHEMA_VERSION)
        if (damage := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise ConfigError(
                f"the ledger {path} is damaged: {damage}; restore a copy, or use another run folder"
            )
    except sqlite3.DatabaseError as e:
        raise ConfigError(f"cannot open the ledger {path}: {e}") from e
