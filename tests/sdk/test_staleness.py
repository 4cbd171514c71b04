"""Admission keeps every trained batch within η, and its count cannot drift."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agent.staleness import Admission

actions = st.lists(st.sampled_from(["admit", "accept", "reject", "train"]), max_size=200)


@settings(max_examples=300)
@given(batch=st.integers(1, 4), eta=st.integers(0, 3), start=st.integers(0, 3), script=actions)
def test_whatever_happens_no_batch_is_staler_than_eta(batch, eta, start, script):
    """The oracle keeps every group by itself; the trainer takes the oldest ready ones and waits for stragglers."""
    a = Admission(batch, eta, version=start)
    version = start
    running: list[int] = []  # the version each was admitted at, oldest first
    ready: list[int] = []
    trained = start * batch
    for action in script:
        if action == "admit" and a.room:
            a.admit()
            running.append(version)
        elif action in ("accept", "reject") and running:
            born = running.pop()  # the youngest first: the worst order for staleness
            a.finish(accepted=action == "accept")
            if action == "accept":
                ready.append(born)
        elif action == "train" and len(ready) >= batch:
            chosen = sorted(ready)[:batch]
            if [b for b in running + sorted(ready)[batch:] if b <= version - eta]:
                continue  # the lease waits for a straggler that would be too old one version later
            assert version - min(chosen) <= eta
            ready = sorted(ready)[batch:]
            trained += batch
            version += 1
            assert a.advance(version)
        assert a.running == len(running)
        assert a.accepted == trained + len(ready)
        assert a.running + a.accepted <= (eta + version + 1) * batch
        assert a.room == (eta + version + 1) * batch - a.running - a.accepted


@given(batch=st.integers(1, 4), eta=st.integers(0, 3), version=st.integers(0, 50))
def test_a_resumed_run_has_the_room_of_one_that_never_stopped(batch, eta, version):
    whole = Admission(batch, eta)
    for v in range(version):
        for _ in range(batch):
            whole.admit()
            whole.finish(accepted=True)
        whole.advance(v + 1)
    assert Admission(batch, eta, version=version).room == whole.room == (eta + 1) * batch


def test_eta_0_admits_exactly_the_next_batch():
    a = Admission(3, 0)
    assert a.room == 3
    for _ in range(3):
        a.admit()
        a.finish(accepted=True)
    assert a.room == 0
    a.advance(1)
    assert a.room == 3


def test_void_groups_give_their_place_back():
    a = Admission(2, 1)
    for _ in range(1000):
        a.admit()
        a.finish(accepted=False)
    assert a.room == 4


def test_nothing_is_admitted_beyond_what_the_run_needs():
    a = Admission(2, 3, total=4)
    assert a.room == 4


def test_the_version_never_goes_back():
    a = Admission(2, 0)
    assert a.advance(2)
    assert not a.advance(1)
    assert a.version == 2


def test_admitting_without_room_is_a_bug_not_a_drift():
    a = Admission(1, 0)
    a.admit()
    with pytest.raises(RuntimeError, match="fill 1"):
        a.admit()
    a.finish(accepted=True)
    with pytest.raises(RuntimeError, match="no group is running"):
        a.finish(accepted=True)
