"""No room, a ledger that is locked: a sentence to the client, nothing half written, and on again afterwards."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_support import ADMIN_KEY, Reply, Served, make_app

from areal_agent.errors import ConfigError
from areal_agent.wire import unpack
from areal_gateway import writer
from areal_gateway.ledger import Ledger, LedgerError
from areal_gateway.rows import delivery_row
from areal_gateway.tokens import Tokens
from areal_gateway.writer import LedgerWriter

BIG = "x" * 2000
WIDE = {str(i): "x" * 1000 for i in range(64)}


@contextmanager
def full(ledger: Ledger) -> Iterator[None]:
    """SQLite may use no page more: what a full disk answers, code and all (SQLITE_FULL)."""
    (pages,) = ledger._writer.db.execute("PRAGMA page_count").fetchone()
    ledger._writer.db.execute(f"PRAGMA max_page_count = {pages}")
    try:
        yield
    finally:
        ledger._writer.db.execute("PRAGMA max_page_count = 1073741823")


def ask(text: str, *before: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": t} for i, t in enumerate((*before, text))]
    return {"messages": messages}


async def test_a_call_that_cannot_be_kept_is_an_error_and_the_session_goes_on(
    served: Served, tokens: Tokens, tmp_path: Path
) -> None:
    session = await served.open()
    served.fleet.say("first", "lost", "second", "third")
    assert (await served.post(session, ask("one")))[0] == 200
    with full(served.ledger):
        status, _, body = await served.post(session, ask(BIG, "one", "first"))
        assert (status, body["error"]["code"]) == (500, "ledger_error")
        assert "full" in body["error"]["message"]
        assert str(tmp_path) not in body["error"]["message"]
    assert (await served.post(session, ask("two", "one", "first")))[0] == 200
    assert (await served.post(session, ask("three", "one", "first", "two", "second")))[0] == 200
    live = await served.inspect(session, trajectory=True)
    assert [c["reply"]["content"] for c in live["calls"]] == ["first", "second", "third"]
    assert len(live["sequences"]) == 1
    await served.stop()
    again = make_app(tokens, tmp_path)  # what memory held is what the file holds
    await again.start()
    assert (await again.inspect(session, trajectory=True))["sequences"] == live["sequences"]
    await again.stop()


async def test_nothing_continues_a_reply_that_was_streamed_and_not_kept(served: Served) -> None:
    """The client saw its words, then an error; a conversation that goes on from there is told anew."""
    session = await served.open()
    served.fleet.say("lost words", "after")
    with full(served.ledger):
        _, _, raw = await served.post(session, {**ask(BIG), "stream": True})
        assert b"lost" in raw
        assert b"ledger_error" in raw
        assert b"[DONE]" not in raw.split(b"ledger_error")[0]
    assert (await served.post(session, ask("go on", BIG, "lost words")))[0] == 200
    (call,) = (await served.inspect(session))["calls"]
    assert (call["parent_id"], call["reply"]["content"]) == (None, "after")


async def test_opening_rewarding_and_sealing_fail_whole_and_can_be_repeated(served: Served) -> None:
    session = await served.open(group_id="g", group_size=2)
    await served.post(session, ask("one"))
    path = f"/admin/sessions/{session['session_id']}"
    with full(served.ledger):
        refused = [
            await served.admin(
                "POST",
                "/admin/sessions",
                {"task_id": "t", "purpose": "train", "group_id": "g", "group_size": 2, "labels": WIDE},
                None,
            ),
            await served.admin("POST", f"{path}/rewards", {"value": 1.0, "key": "k", "labels": WIDE}, None),
        ]
        assert [(s, b["error"]["code"]) for s, b in refused] == [(500, "ledger_error")] * 2
    assert served.gateway.sessions.open_count == 1
    assert (await served.inspect(session))["rewards"] == []
    await served.admin("POST", f"{path}/rewards", {"value": 1.0, "key": "k", "labels": WIDE})
    other = await served.open(group_id="g", group_size=2)  # the failed one left no ghost in the group
    await served.post(other, ask("one"))
    for s in (session, other):
        assert (await served.seal(s, reward=1.0))["state"] == "sealed"
    assert served.gateway.leases.counts()["ready"] == 1


async def test_an_ack_that_was_not_written_is_written_when_it_is_repeated(
    served: Served, tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await served.open()
    await served.post(session, ask("one"))
    await served.seal(session, reward=1.0)
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    url = served.url + "/admin/trajectories/lease"
    async with served.http.post(url, json={"groups": 1}, headers=headers) as r:
        lease = {"lease_id": unpack(await r.read()).lease_id}
    transaction = LedgerWriter._transaction

    def no_room(self: LedgerWriter, items: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(LedgerWriter, "_transaction", no_room)
    status, body = await served.admin("POST", "/admin/trajectories/ack", lease, None)
    assert (status, body["error"]["code"]) == (500, "ledger_error")
    monkeypatch.setattr(LedgerWriter, "_transaction", transaction)
    await served.admin("POST", "/admin/trajectories/ack", lease)
    await served.admin("POST", "/admin/trajectories/ack", lease)
    await served.stop()
    again = make_app(tokens, tmp_path)
    await again.start()
    assert again.gateway.leases.counts()["consumed"] == 1
    await again.stop()


async def test_a_ledger_locked_by_another_program_is_waited_for_then_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BUSY_S", 0.3)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    other = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waiting = ledger.append(delivery_row("a", 1.0))
    await asyncio.sleep(0.1)
    other.execute("COMMIT")
    await waiting
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError, match="locked"):
        await ledger.append(delivery_row("b", 1.0))
    other.execute("COMMIT")
    await ledger.append(delivery_row("b", 1.0))
    assert other.execute("SELECT call_id FROM deliveries ORDER BY call_id").fetchall() == [("a",), ("b",)]
    other.close()
    ledger.close()


async def test_a_value_sqlite_cannot_hold_fails_alone_and_the_writer_lives(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    bad = ledger.append(("INSERT INTO deliveries VALUES (?,?)", ("\ud800", 1.0)))
    good = ledger.append(delivery_row("a", 1.0))
    with pytest.raises(LedgerError, match="surrogates"):
        await bad
    await good
    ledger.close()


def test_a_damaged_file_is_said_before_anything_is_served(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    data = bytearray(path.read_bytes())
    data[4096 : 4096 * 6] = b"\xff" * (4096 * 5)
    path.write_bytes(data)
    with pytest.raises((ConfigError, LedgerError), match=r"ledger.sqlite.*(malformed|damaged)"):
        Ledger(path)


async def test_a_reply_replayed_after_the_disk_was_full_is_made_anew(served: Served) -> None:
    """An SDK repeats a 500; the repetition is served and kept, and there is one call, not two."""
    session = await served.open()
    served.fleet.say(Reply("one"), Reply("two"))
    with full(served.ledger):
        assert (await served.post(session, ask(BIG)))[0] == 500
    status, _, body = await served.post(session, ask(BIG), {"x-stainless-retry-count": "1"})
    assert (status, body["choices"][0]["message"]["content"]) == (200, "two")
    assert len((await served.inspect(session))["calls"]) == 1
