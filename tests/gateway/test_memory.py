"""Memory: what a sealed session leaves behind in the process is nothing."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from gateway_support import Served

from areal_gateway.exchange import Exchange
from areal_gateway.leases import Group
from areal_gateway.records import CallRecord, LeaseRecord, SealRecord, SessionRecord
from areal_gateway.sessions import Session
from areal_gateway.tree import Node

OURS = (Session, SessionRecord, CallRecord, SealRecord, Exchange, Node, Group)
PAGE = os.sysconf("SC_PAGE_SIZE")


def alive() -> Iterator[Any]:
    gc.collect()
    return (o for o in gc.get_objects() if type(o) in OURS)


def resident_mib() -> float:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * PAGE / 2**20


async def live_through(served: Served, n: int, purpose: str) -> None:
    """n whole sessions; those for training are leased and acked."""
    leases = served.gateway.leases
    for i in range(n):
        session = await served.open(f"task {i}", purpose)
        body = {"messages": [{"role": "user", "content": f"question {i} " + "x" * 500}]}
        assert (await served.post(session, body))[0] == 200
        await served.seal(session, reward=1.0)
        if purpose == "train":
            batch = await leases.lease(
                want=1, max_staleness=None, wait_s=0.0, lease_s=60.0, version=lambda: 0
            )
            assert batch is not None
            await leases.ack(batch.lease_id)


@pytest.mark.parametrize("purpose", ["train", "eval"])
async def test_a_sealed_session_leaves_no_object(served: Served, purpose: str) -> None:
    await live_through(served, 3, purpose)
    before = sum(1 for _ in alive())
    await live_through(served, 20, purpose)
    left = list(alive())
    assert len(left) <= before + 2, [type(o).__name__ for o in left]
    assert served.gateway.leases._leases == {}
    assert not any(type(o) is LeaseRecord for o in gc.get_objects())


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_ten_thousand_sealed_sessions(served: Served) -> None:
    await live_through(served, 1000, "train")
    gc.collect()
    start = resident_mib()
    await live_through(served, 10_000, "train")
    gc.collect()
    served.fleet.asked.clear()  # the scripted fleet's own books
    grown = resident_mib() - start
    print(f"10 000 sealed sessions: {start:.0f} MiB, then {grown:+.1f} MiB")
    assert grown < 64
