"""The ledger's only writer: rows in, one commit for all that came together, futures that say so.

Invariant: rows are written in the order in which they came, those of one append all or none, and a future
resolves after its rows are committed.

A commit that is not flushed to the disk is a copy into the page cache, some 0.1 ms. It is made on the event
loop: handing it to a thread costs more than that, twice, and a busy loop keeps the thread from the
interpreter for 5 ms at each of its statements. What may take long is the thread's: commits that are flushed
(`sync="full"`), checkpoints, a file that another program holds, a disk that is slow. While the thread has
anything to do, all rows go to it, so there is never more than one that writes.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable

from areal_agent.errors import ArealError
from areal_gateway.rows import Row

log = logging.getLogger(__name__)

BUSY_S = 30.0
"""Longest a write waits for another program that holds the file, a backup for instance."""

CHECKPOINT_ROWS = 1000
"""Rows after which the write-ahead log is folded into the file; a call is two, of some 4 kB."""

GROUP_LIMIT = 1024
"""Most rows in one commit; bounds how long the first of them waits for the last."""

SLOW_S = 0.01
"""A commit that took longer shows a disk that is not keeping up; the thread takes over for SLOW_FOR_S."""

SLOW_FOR_S = 1.0

NOTE_S = 0.02
"""Longest a note waits for a commit to go with."""


class LedgerError(ArealError):
    """The ledger could not be written or read; nothing that depends on the row may be acknowledged.

    Its message is shown to agents as well, and names no path.
    """


_Item = tuple[list[Row], Callable[[BaseException | None], None]]


class LedgerWriter:
    """Writes through `db`, which nobody else uses. `append` and `note` are the event loop's."""

    def __init__(self, db: sqlite3.Connection, *, flushed: bool) -> None:
        self.db = db
        self.commits = 0
        self.rows = 0
        self._flushed = flushed
        self._pending: list[_Item] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due: asyncio.Handle | None = None
        self._at_once = False
        """Whether `_due` is at the loop's next turn, and not only some time soon."""
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._handed = 0
        """What was given to the thread; `_done` counts what it has done, by itself."""
        self._done = 0
        self._slow_until = 0.0
        self._since_checkpoint = 0
        self._closed = False
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute("PRAGMA busy_timeout = 0")
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    def append(self, *rows: Row) -> asyncio.Future[None]:
        """See Ledger.append."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        done.add_done_callback(_log_if_unseen)

        def settle(error: BaseException | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(LedgerError(f"cannot write to the ledger: {error}"))

        self._take(loop, list(rows), settle)
        if not self._at_once:
            if self._due is not None:
                self._due.cancel()
            self._due, self._at_once = loop.call_soon(self._flush), True
        return done

    def note(self, *rows: Row) -> None:
        """See Ledger.note."""
        loop = asyncio.get_running_loop()
        self._take(loop, list(rows), _unseen)
        if self._due is None:
            self._due = loop.call_later(NOTE_S, self._flush)

    def _take(
        self, loop: asyncio.AbstractEventLoop, rows: list[Row], settle: Callable[[BaseException | None], None]
    ) -> None:
        if self._closed:
            raise LedgerError("the ledger is closed")
        self._loop = loop
        self._pending.append((rows, settle))

    def _flush(self) -> None:
        """Commit what is pending, here or in the thread."""
        self._due, self._at_once = None, False
        left, self._pending = self._pending, []
        idle = self._handed == self._done
        if idle and not self._flushed and time.monotonic() >= self._slow_until:
            began = time.monotonic()
            left = self._commit_now(left)
            if time.monotonic() - began > SLOW_S:
                self._slow_until = time.monotonic() + SLOW_FOR_S
            if not left and self._since_checkpoint >= CHECKPOINT_ROWS:
                left = [([], _unseen)]  # nothing to write: the thread wakes and sees that a checkpoint is due
        for item in left:
            self._hand(item)

    def _commit_now(self, group: list[_Item]) -> list[_Item]:
        """Commit without waiting for another program; what would have to is given back."""
        try:
            self._transaction(rows for rows, _ in group)
        except Exception as e:  # not SQLite's only: a value it cannot hold must not end the gateway either
            if _busy(e):
                return group
            if len(group) == 1:
                _failed(group[0], e)
                return []
            for i, item in enumerate(group):  # one bad row must not fail its neighbours
                if self._commit_now([item]):
                    return group[i:]
            return []
        for _, settle in group:
            settle(None)
        return []

    # -- the thread -------------------------------------------------------------------------------

    def _hand(self, item: _Item) -> None:
        assert self._loop is not None
        rows, settle = item
        self._handed += 1
        self._queue.put((rows, _threadsafe(self._loop, settle)))

    def _work(self) -> None:
        """Take what is queued, commit it together, tell everyone."""
        stop = False
        while not stop:
            item = self._queue.get()
            group: list[_Item] = []
            while item is not None:
                group.append(item)
                try:
                    item = self._queue.get_nowait() if len(group) < GROUP_LIMIT else None
                except queue.Empty:
                    break
            else:
                stop = len(group) < GROUP_LIMIT
            self.db.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1e3)}")
            if any(rows for rows, _ in group):
                self._commit(group)
            else:
                for _, settle in group:
                    settle(None)
            if self._since_checkpoint >= CHECKPOINT_ROWS:
                self._checkpoint()
            self.db.execute("PRAGMA busy_timeout = 0")
            self._done += len(group)

    def _commit(self, group: list[_Item]) -> None:
        try:
            self._transaction(rows for rows, _ in group)
        except Exception as e:
            if len(group) == 1 or _busy(e):  # each alone would wait as long again
                for item in group:
                    _failed(item, e)
                return
            for item in group:
                self._commit([item])
            return
        for _, settle in group:
            settle(None)

    def _transaction(self, items: Iterable[list[Row]]) -> None:
        written = 0
        self.db.execute("BEGIN IMMEDIATE")
        try:
            for rows in items:
                for sql, values in rows:
                    self.db.execute(sql, values)
                    written += 1
            self.db.execute("COMMIT")
        except BaseException:
            if self.db.in_transaction:  # a full disk may have ended it already
                self.db.execute("ROLLBACK")
            raise
        self.commits += 1
        self.rows += written
        self._since_checkpoint += written

    def _checkpoint(self) -> None:
        self._since_checkpoint = 0
        try:
            self.db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as e:  # nothing is lost: the rows stay in the write-ahead log, and it grows
            log.warning("the ledger's write-ahead log could not be folded into the file: %s", e)

    def close(self) -> None:
        """Write what is pending, then close. Further appends raise."""
        if self._closed:
            return
        self._closed = True
        left, self._pending = self._pending, []
        for item in left:
            self._hand(item)
        self._queue.put(None)
        self._thread.join(2 * BUSY_S)
        if self._thread.is_alive():  # SQLite may not be closed under it; the process ends with it soon
            log.error("the ledger's last rows could not be written within %g s", 2 * BUSY_S)
            return
        self.db.close()


def _busy(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _failed(item: _Item, error: Exception) -> None:
    log.error("ledger write failed: %s", error)
    item[1](error)


def _threadsafe(
    loop: asyncio.AbstractEventLoop, settle: Callable[[BaseException | None], None]
) -> Callable[[BaseException | None], None]:
    def settled(error: BaseException | None) -> None:
        if settle is _unseen:
            return
        try:
            loop.call_soon_threadsafe(settle, error)
        except RuntimeError:  # the loop is closed: the row is on disk and nobody waits for it
            log.debug("a ledger commit outlived its event loop")

    return settled


def _unseen(error: BaseException | None) -> None:
    """The writer has logged it."""


def _log_if_unseen(done: asyncio.Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("%s", error)
