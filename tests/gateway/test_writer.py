"""Where the ledger's rows are written, and that they stay in order when that changes."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest

from areal_gateway import writer
from areal_gateway.ledger import Ledger, LedgerError
from areal_gateway.rows import delivery_row
from areal_gateway.writer import LedgerWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each commit, whether the event loop made it."""
    found: list[bool] = []
    transaction = LedgerWriter._transaction

    def watched(self: LedgerWriter, items: object) -> None:
        found.append(threading.current_thread() is threading.main_thread())
        transaction(self, items)  # type: ignore[arg-type]

    monkeypatch.setattr(LedgerWriter, "_transaction", watched)
    return found


def rows_of(path: Path) -> list[str]:
    with sqlite3.connect(path) as db:
        return [c for (c,) in db.execute("SELECT call_id FROM deliveries ORDER BY rowid")]


@pytest.mark.parametrize(("sync", "on_loop"), [("normal", True), ("full", False)])
async def test_only_commits_that_are_not_flushed_are_the_loops(
    path: Path, threads: list[bool], sync: str, on_loop: bool
) -> None:
    ledger = Ledger(path, sync)  # type: ignore[arg-type]
    for i in range(5):
        await ledger.append(delivery_row(f"c{i}", 1.0))
    ledger.close()
    assert set(threads) == {on_loop}
    assert rows_of(path) == [f"c{i}" for i in range(5)]


async def test_a_held_file_is_waited_for_without_holding_the_loop_and_in_order(
    path: Path, threads: list[bool]
) -> None:
    ledger = Ledger(path)
    await ledger.append(delivery_row("c0", 1.0))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waiting = [ledger.append(delivery_row(f"c{i}", 1.0)) for i in range(1, 4)]
    await asyncio.sleep(0.05)  # the loop goes on
    waiting += [ledger.append(delivery_row(f"c{i}", 1.0)) for i in range(4, 7)]
    ledger.note(delivery_row("c7", 1.0))
    assert not any(w.done() for w in waiting)
    other.execute("COMMIT")
    other.close()
    await asyncio.gather(*waiting)
    await asyncio.sleep(0.05)
    await ledger.append(delivery_row("c8", 1.0))
    ledger.close()
    assert rows_of(path) == [f"c{i}" for i in range(9)]
    assert threads[0]
    assert False in threads


async def test_a_slow_disk_is_the_threads_for_a_while(
    path: Path, threads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SLOW_S", -1.0)
    monkeypatch.setattr(writer, "SLOW_FOR_S", 0.3)
    ledger = Ledger(path)
    await ledger.append(delivery_row("c0", 1.0))
    await ledger.append(delivery_row("c1", 1.0))
    await asyncio.sleep(0.4)
    await ledger.append(delivery_row("c2", 1.0))
    ledger.close()
    assert threads == [True, False, True]
    assert rows_of(path) == ["c0", "c1", "c2"]


async def test_the_write_ahead_log_is_folded_into_the_file_and_does_not_grow(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CHECKPOINT_ROWS", 50)
    ledger = Ledger(path)
    sizes = []
    for i in range(2000):
        await ledger.append(delivery_row(f"c{i}", 1.0))
        sizes.append(path.with_name(path.name + "-wal").stat().st_size)
    ledger.close()
    assert max(sizes[1000:]) <= 1.5 * max(sizes[:1000])
    assert max(sizes) < 2**21
    assert len(rows_of(path)) == 2000


async def test_what_was_noted_just_before_the_end_is_kept(path: Path) -> None:
    ledger = Ledger(path)
    ledger.note(delivery_row("c0", 1.0))
    ledger.close()
    assert rows_of(path) == ["c0"]


async def test_a_file_that_stays_held_fails_all_that_wait_at_once_and_ends_no_process(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "BUSY_S", 0.3)
    ledger = Ledger(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    began = asyncio.get_running_loop().time()
    waiting = [ledger.append(delivery_row(f"c{i}", 1.0)) for i in range(20)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(r, LedgerError) for r in results)
    assert asyncio.get_running_loop().time() - began < 20 * 0.3 / 2
    for i in range(20):
        ledger.note(delivery_row(f"c{i}", 1.0))
    ledger.close()
    other.execute("COMMIT")
    other.close()
    assert "locked" in caplog.text
    assert rows_of(path) == []
