"""Resuming: leases that a trainer lost come again as they were, and open groups nobody will finish end."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from gateway_support import Served, as_schema_1, make_app
from test_leases import lease, run_group

from areal_agent.trajectory import Batch
from areal_gateway.groups import undo
from areal_gateway.ledger import Ledger
from areal_gateway.records import LeaseEnd, LeaseRecord
from areal_gateway.schema import TABLES
from areal_gateway.tokens import Tokens


def columns(batch: Batch) -> list[Any]:
    """What is trained: everything but the lease's own id and version."""
    return [
        (s.session_id, s.token_ids, s.logprobs, s.versions, s.loss_mask, s.reward) for s in batch.sequences
    ]


async def end(served: Served, how: str, batch: Batch, status: int = 200) -> None:
    await served.admin("POST", f"/admin/trajectories/{how}", {"lease_id": batch.lease_id}, status)


async def rewind(served: Served, version: int) -> int:
    return (await served.admin("POST", "/admin/trajectories/rewind", {"version": version}))["batches"]


async def train(served: Served, batches: int, groups: int = 2) -> list[Batch]:
    """Lease and ack; every batch makes a version."""
    out = []
    for _ in range(batches):
        out.append(await lease(served, groups=groups))
        served.fleet.version += 1
        await end(served, "ack", out[-1])
    return out


@pytest.mark.parametrize("restart", [False, True])
async def test_batches_since_a_version_come_again_as_they_were(
    tokens: Tokens, tmp_path: Path, restart: bool
) -> None:
    served = make_app(tokens, tmp_path)
    await served.start()
    for g in range(8):
        await run_group(served, f"g{g}", [1.0, 0.5])
    done = await train(served, 2)
    open_lease = await lease(served, groups=2)
    before = await served.admin("GET", "/admin/status")
    assert await rewind(served, 1) == 2
    assert await rewind(served, 1) == 2  # once more changes nothing
    await end(served, "ack", open_lease, 409)  # of a trainer that should be dead
    if restart:
        await served.stop()
        served = make_app(tokens, tmp_path)
        await served.start()
    try:
        served.fleet.version = 1
        again = await train(served, 2)
        assert [columns(b) for b in again] == [columns(b) for b in (done[1], open_lease)]
        fresh = await lease(served, groups=2)  # then what was never leased
        assert {s.group_id for s in fresh.sequences} == {"g6", "g7"}
        counts = (await served.admin("GET", "/admin/status"))["groups"]
        assert counts == {"open": 0, "ready": 0, "leased": 2, "consumed": 6, "void": 0}
        assert before["groups"]["consumed"] == 4
    finally:
        await served.stop()


async def test_a_batch_that_was_given_back_while_repeated_is_next_again(served: Served) -> None:
    for g in range(4):
        await run_group(served, f"g{g}", [1.0, 0.5])
    first, _ = await train(served, 2)
    await rewind(served, 0)
    given_back = await lease(served)  # one group is asked for, the old batch of two is what comes
    await end(served, "nack", given_back)
    assert columns(await lease(served)) == columns(given_back) == columns(first)


def record(i: int, version: int, *groups: str) -> LeaseRecord:
    return LeaseRecord(f"l{i}", version, groups, 0.0, 0.0)


def test_a_group_given_back_and_leased_otherwise_counts_where_it_was_last() -> None:
    leases = [
        (record(0, 3, "a", "b"), LeaseEnd.NACK),
        (record(1, 3, "a", "c"), LeaseEnd.ACK),
        (record(2, 4, "b", "d"), None),
        (record(3, 4, "e"), LeaseEnd.NACK),
    ]
    result = undo(leases, [(3, 4)])
    assert list(result.again) == [("a", "c"), ("b", "d"), ("e",)]
    assert result.leases == {"l0", "l1", "l2", "l3"}


def test_rewinds_follow_one_another() -> None:
    leases = [(record(i, v, g), LeaseEnd.ACK) for i, (v, g) in enumerate([(0, "a"), (1, "b"), (2, "c")])]
    assert list(undo(leases, [(1, 3)]).again) == [("b",), ("c",)]
    leases.append((record(3, 1, "b"), LeaseEnd.ACK))
    result = undo(leases, [(1, 3)])
    assert list(result.again) == [("c",)]
    assert result.repeated == {"l3"}
    assert list(undo(leases, [(1, 3), (1, 4)]).again) == [("b",), ("c",)]
    assert list(undo(leases, [(1, 3), (0, 4)]).again) == [("a",), ("b",), ("c",)]


async def test_a_renewed_lease_outlives_its_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from areal_gateway import leases

    now = [1000.0]
    monkeypatch.setattr(leases.time, "time", lambda: now[0])
    for g in "ab":
        await run_group(served, g, [1.0, 0.5])
    kept, lost = await lease(served, lease_s=10.0), await lease(served, lease_s=10.0)
    now[0] += 9
    await served.admin("POST", "/admin/trajectories/renew", {"lease_id": kept.lease_id, "lease_s": 10.0})
    now[0] += 9
    await end(served, "ack", kept)
    await end(served, "ack", lost, 409)
    body = {"lease_id": lost.lease_id, "lease_s": 10.0}
    error = (await served.admin("POST", "/admin/trajectories/renew", body, 409))["error"]
    assert error["code"] == "lease_expired"


async def test_groups_nobody_will_finish_are_void_for_good(tokens: Tokens, tmp_path: Path) -> None:
    served = make_app(tokens, tmp_path)
    await served.start()
    await run_group(served, "done", [1.0, 0.5])
    half = [await served.open(group_id="half", group_size=2) for _ in range(2)]
    await served.post(half[0], {"messages": [{"role": "user", "content": "What is two plus three?"}]})
    await served.seal(half[0], reward=1.0)
    assert await served.admin("POST", "/admin/groups/abandon", {}) == {"groups": ["half"], "sessions": 1}
    for again in (False, True):
        if again:
            await served.stop()
            served = make_app(tokens, tmp_path)
            await served.start()
        states = (await served.admin("GET", "/admin/groups"))["groups"]
        assert states == {"done": "ready", "half": "abandoned"}
    await lease(served, groups=2, status=204)
    await served.stop()


def test_a_ledger_of_the_first_schema_is_brought_up(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    as_schema_1(path)
    Ledger(path).close()
    with sqlite3.connect(path) as db:
        names = {r[0] for r in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert set(TABLES) <= names
        db.execute("INSERT INTO voids VALUES ('g', 'why', 0)")
        with pytest.raises(sqlite3.DatabaseError, match="append-only"):
            db.execute("DELETE FROM voids")
