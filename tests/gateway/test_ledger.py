"""The ledger: append-only, durable before it says so, and the same after a restart."""

from __future__ import annotations

import asyncio
import hashlib
import math
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from gateway_support import as_schema_1

from areal_agent.errors import ConfigError
from areal_gateway.agent import digest_of
from areal_gateway.canonical import tools_key
from areal_gateway.ledger import Ledger, LedgerError
from areal_gateway.records import (
    CallRecord,
    CallState,
    Outcome,
    RewardRecord,
    Sampling,
    SealRecord,
    SessionHistory,
    SessionRecord,
    floats,
    ints,
)
from areal_gateway.rows import (
    call_rows,
    delivery_row,
    reward_row,
    rewind_row,
    seal_row,
    session_row,
    void_row,
)
from areal_gateway.schema import SCHEMA_VERSION, TABLES


def session(i: int = 0) -> SessionRecord:
    return SessionRecord(
        session_id=f"s{i}",
        key_hash=bytes([i]) * 32,
        task_id="t",
        group_id="g",
        group_size=2,
        purpose="train",
        sampling=Sampling(temperature=0.7, seed=3),
        deadline_s=1.5,
        labels={"a": "b"},
        opened_version=4,
        opened_at=12.5,
        admitted=i,
    )


def call(call_id: str = "c0", session_id: str = "s0", **over: object) -> CallRecord:
    fields = {
        "call_id": call_id,
        "session_id": session_id,
        "exchange_id": "e0",
        "index": 0,
        "parent_id": None,
        "cause": "root",
        "state": CallState.COMPLETE,
        "reason": None,
        "finish_reason": "stop",
        "dialect": "chat.completions",
        "digest": b"d",
        "retry_key": None,
        "labels": {"node": "x"},
        "messages": [{"role": "user", "content": "hi ☃"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "reply": {"role": "assistant", "content": "yes"},
        "shared": 0,
        "suffix_ids": ints([1, 2, 3]),
        "output_ids": ints([4, 5]),
        "logprobs": floats([-0.5, -0.25]),
        "spans": ((0, 1, 4), (1, 2, 5)),
        "temperature": 0.7,
        "max_tokens": 10,
        "seed": None,
        "started_at": 1.0,
        "ended_at": 2.0,
    }
    return CallRecord(**{**fields, **over})  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


async def test_what_was_written_is_read_back(path: Path) -> None:
    ledger = Ledger(path)
    reward = RewardRecord("s0", "k", "reward", None, "c0", 3.0)
    seal = SealRecord("s0", Outcome.TIMEOUT, "why", 0.5, 2, 4, 1, 9.0)
    child = call("c1", parent_id="c0", cause=None, shared=5, tools=[], reply=None, state=CallState.ABORTED)
    await ledger.append(session_row(session()), *call_rows(call()), *call_rows(child))
    await ledger.append(delivery_row("c0", 3.0), reward_row(reward), seal_row(seal))
    ledger.close()
    again = Ledger(path)
    assert again.histories(["s0", "unknown"]) == {
        "s0": SessionHistory(session(), [call(), child], {"c0"}, [reward], seal)
    }
    assert again.sessions() == [(session(), seal)]
    assert again.call_totals() == ({"complete": 1, "aborted": 1}, 4)
    assert again.session_id_of_key(session().key_hash) == "s0"
    again.close()


async def test_a_missing_logprob_keeps_its_place(path: Path) -> None:
    ledger = Ledger(path)
    await ledger.append(session_row(session()), *call_rows(call(logprobs=floats([None, -0.25]))))
    (back,) = ledger.histories(["s0"])["s0"].calls
    assert math.isnan(back.logprobs[0])
    assert back.logprobs[1] == -0.25
    ledger.close()


async def test_tools_are_kept_once_for_all_calls(path: Path) -> None:
    ledger = Ledger(path)
    await ledger.append(session_row(session()), *call_rows(call("a")), *call_rows(call("b")))
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT COUNT(*) FROM tool_lists").fetchone() == (1,)
    ledger.close()


async def test_a_call_that_goes_on_writes_no_tools_again_and_finds_its_parent_s(path: Path) -> None:
    ledger = Ledger(path)
    child = call("c1", parent_id="c0", cause=None)
    rows = call_rows(child, tools_written=True)
    assert len(rows) == 1
    await ledger.append(session_row(session()), *call_rows(call()))
    await ledger.append(*rows)
    assert ledger.histories(["s0"])["s0"].calls == [call(), child]
    ledger.close()


def test_the_key_of_a_tool_list_is_the_one_in_ledgers_that_are_there() -> None:
    """A conversation that is open while its gateway is updated goes on by the key its parent was written with."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert tools_key([]).hex() == "7ebb3c7c2a87b1a2f8a7ed729ecb040d"
    assert tools_key(tools).hex() == "524e2936df0ce30895f021a628d9e052"


def test_the_digest_of_a_request_is_the_one_in_ledgers_that_are_there() -> None:
    """By it a client that tries again after its gateway was updated gets the reply that is there."""
    assert (
        digest_of("chat.completions", {"b": 1, "a": [2]})
        == hashlib.blake2b(b'chat.completions{"a":[2],"b":1}', digest_size=16).digest()
    )


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("sql", ["UPDATE {t} SET rowid = rowid + 1", "DELETE FROM {t}"])
async def test_no_row_can_be_changed_or_removed(path: Path, table: str, sql: str) -> None:
    ledger = Ledger(path)
    fill = {
        "sessions": [session_row(session())],
        "calls": call_rows(call()),
        "tool_lists": call_rows(call()),
        "deliveries": [delivery_row("c", 1.0)],
        "rewards": [reward_row(RewardRecord("s", "k", "reward", 1.0, None, 1.0))],
        "seals": [seal_row(SealRecord("s", Outcome.FINISHED, None, None, 0, None, 0, 1.0))],
        "leases": [("INSERT INTO leases VALUES ('l', 1, 1.0, 1.0)", ())],
        "lease_groups": [("INSERT INTO lease_groups VALUES ('l', 'g')", ())],
        "lease_ends": [("INSERT INTO lease_ends VALUES ('l', 'ack', 1.0)", ())],
        "rewinds": [rewind_row(1, 1.0)],
        "voids": [void_row("g", "why", 1.0)],
    }
    await ledger.append(*fill[table])
    with sqlite3.connect(path) as db, pytest.raises(sqlite3.IntegrityError, match="append-only"):
        db.execute(sql.format(t=table))
    with pytest.raises(LedgerError, match="append-only"):
        await ledger.append((sql.format(t=table), ()))
    ledger.close()


async def test_a_bad_row_fails_alone(path: Path) -> None:
    ledger = Ledger(path)
    good = [ledger.append(session_row(session(i))) for i in range(5)]
    bad = ledger.append(session_row(session(0)))
    more = [ledger.append(session_row(session(i))) for i in range(5, 9)]
    results = await asyncio.gather(*good, bad, *more, return_exceptions=True)
    assert [isinstance(r, LedgerError) for r in results] == [False] * 5 + [True] + [False] * 4
    assert len(ledger.sessions()) == 9
    ledger.close()


async def test_rows_of_one_append_are_all_or_none(path: Path) -> None:
    ledger = Ledger(path)
    await ledger.append(session_row(session(0)))
    with pytest.raises(LedgerError):
        await ledger.append(session_row(session(1)), session_row(session(0)))
    assert [s.session_id for s, _ in ledger.sessions()] == ["s0"]
    ledger.close()


async def test_appends_that_wait_together_share_a_commit(path: Path) -> None:
    ledger = Ledger(path)
    await asyncio.gather(*(ledger.append(session_row(session(i))) for i in range(200)))
    assert ledger._writer.commits < 100
    ledger.close()


async def test_a_newer_file_is_refused_with_a_sentence(path: Path) -> None:
    Ledger(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(ConfigError, match=f"schema {SCHEMA_VERSION + 1}.*newer"):
        Ledger(path)


async def test_an_older_file_is_brought_up_to_date_and_keeps_its_rows(path: Path) -> None:
    ledger = Ledger(path)
    await ledger.append(session_row(session()), reward_row(RewardRecord("s0", "k", "reward", 0.5, None, 3.0)))
    ledger.close()
    as_schema_1(path)
    again = Ledger(path)
    labelled = RewardRecord("s0", "k", "reward", 1.0, None, 4.0, {"role": "solver"})
    await again.append(reward_row(labelled))
    rewards = again.histories(["s0"])["s0"].rewards
    assert [(r.value, r.labels) for r in rewards] == [(0.5, {}), (1.0, {"role": "solver"})]
    with pytest.raises(LedgerError, match="never written"):
        await again.append(*call_rows(call("c1", parent_id="c0")))
    again.close()
    Ledger(path).close()


def test_a_file_that_is_no_ledger_is_refused(path: Path) -> None:
    path.write_bytes(b"x" * 4096)
    with pytest.raises(ConfigError, match="cannot open the ledger"):
        Ledger(path)


def test_somebody_elses_database_is_refused(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE mine (x)")
    with pytest.raises(ConfigError, match="no ledger"):
        Ledger(path)


def test_two_gateways_never_share_a_ledger(path: Path) -> None:
    first = Ledger(path)
    with pytest.raises(ConfigError, match="in use"):
        Ledger(path)
    first.close()
    Ledger(path).close()


def test_an_acknowledged_row_survives_kill_9(path: Path) -> None:
    script = textwrap.dedent(
        """
        import asyncio, sys, time
        from areal_gateway.ledger import Ledger
        from areal_gateway.rows import delivery_row
        async def main():
            ledger = Ledger(sys.argv[1])
            for i in range(1000):
                await ledger.append(delivery_row(f"c{i}", 1.0))
                print(i, flush=True)
            time.sleep(60)
        asyncio.run(main())
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = -1
    for line in process.stdout:
        told = int(line)
        if told >= 50:
            process.send_signal(signal.SIGKILL)
            break
    told = max([told, *map(int, process.stdout.read().split())])
    process.wait()
    with sqlite3.connect(path) as db:
        (count,) = db.execute("SELECT COUNT(*) FROM deliveries").fetchone()
    assert count >= told + 1 >= 51
