"""Running what the user wrote: missing is not 0, time-outs count execution only, nothing hangs."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent import userland
from areal_agent.errors import ConfigError, RewardError
from areal_agent.rewards import RewardRunner, exact_match
from areal_agent.rewards.runner import as_reward
from areal_agent.userland import TimedOut, TooManyAbandoned, Userland


async def run(fn: Any, *, timeout: float = 5.0, task: Any = None, result: Any = "r", **extras: Any):
    runner = RewardRunner(fn, timeout)
    return await runner.run(task or {}, result, extras), runner.counts


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.5, 1.5),
        (2, 2.0),
        (True, 1.0),
        (False, 0.0),
        (None, None),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
    ],
)
@pytest.mark.parametrize("kind", ["sync", "async", "lambda around async"])
async def test_numbers_and_none_are_rewards(value, expected, kind):
    async def coroutine(task, result):
        return value

    fn = {"sync": lambda task, result: value, "async": coroutine}.get(kind, lambda t, r: coroutine(t, r))
    reward, _ = await run(fn)
    assert reward.value == expected
    assert reward.error is None


@pytest.mark.parametrize("value", ["1.0", {"a": 1.0}, [1.0], object(), 1 + 0j])
async def test_anything_else_stops_the_run_with_a_sentence(value):
    with pytest.raises(
        RewardError, match=r"returned .* for task \{'q': 1\}; it must return a number, or None"
    ):
        await run(lambda task, result: value, task={"q": 1})


@given(st.one_of(st.floats(allow_nan=True), st.integers(-(10**9), 10**9), st.booleans(), st.none()))
def test_only_finite_numbers_pass(value):
    if value is None or abs(value) < float("inf"):
        assert as_reward(value, {}) == value
    else:
        with pytest.raises(RewardError, match="finite number"):
            as_reward(value, {})


async def test_an_exception_is_missing_and_shown_once_with_its_traceback(caplog):
    def reward(task, result):
        raise KeyError("answer")

    runner = RewardRunner(reward, 5.0)
    with caplog.at_level(logging.WARNING, "areal_agent"):
        for _ in range(3):
            r = await runner.run({"q": 1}, None, {})
            assert r.value is None
            assert isinstance(r.error, KeyError)
    assert runner.counts == {"failed": 3}
    (record,) = caplog.records
    assert "missing (not 0)" in record.getMessage()
    assert "raise KeyError" in caplog.text


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_time_out_is_missing(is_async):
    def slow(task, result):
        time.sleep(0.5)

    async def slow_async(task, result):
        await asyncio.sleep(30)

    start = time.monotonic()
    reward, counts = await run(slow_async if is_async else slow, timeout=0.1)
    assert isinstance(reward.error, TimedOut)
    assert reward.value is None
    assert counts == {"timeout": 1}
    assert time.monotonic() - start < 0.45


async def test_waiting_in_the_queue_does_not_count(monkeypatch):
    """Ten rewards of 0.1 s through one slot: the last waits 0.9 s and still has its 0.3 s."""
    runner = RewardRunner(lambda task, result: time.sleep(0.1) or 1.0, 0.3)
    runner._threads = asyncio.Semaphore(1)
    rewards = await asyncio.gather(*(runner.run({}, None, {}) for _ in range(10)))
    assert [r.value for r in rewards] == [1.0] * 10


async def test_a_time_out_of_the_users_own_is_a_failure_not_ours():
    def reward(task, result):
        raise TimeoutError("the judge's")

    r, counts = await run(reward)
    assert counts == {"failed": 1}
    assert not isinstance(r.error, TimedOut)


async def test_a_coroutine_that_swallows_cancellation_cannot_hang_the_caller(monkeypatch):
    monkeypatch.setattr(userland, "CANCEL_S", 0.05)
    release = asyncio.Event()

    async def stubborn(task, result):
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    start = time.monotonic()
    reward, _ = await run(stubborn, timeout=0.05)
    assert isinstance(reward.error, TimedOut)
    assert time.monotonic() - start < 1
    release.set()
    await asyncio.sleep(0.01)


async def test_threads_that_run_on_are_bounded_and_said(monkeypatch):
    monkeypatch.setattr(userland, "_abandoned", threading.Semaphore(2))
    release = threading.Event()
    user = Userland(lambda task: release.wait(), "agent", ("task",), ())

    async def attempt():
        with pytest.raises(TimedOut):
            await user.call({}, timeout=0.02, extras={})

    await attempt()
    await attempt()
    with pytest.raises(TooManyAbandoned, match="still run"):
        await user.call({}, timeout=0.02, extras={})
    release.set()
    await asyncio.sleep(0.2)
    await user.call({}, timeout=5, extras={})  # those that ended have given their places back
    release.clear()
    await attempt()
    release.set()


async def test_cancelling_more_threads_than_may_run_on_is_a_cancellation(monkeypatch):
    """Ctrl-C must end as such, however many sync agents still run."""
    monkeypatch.setattr(userland, "_abandoned", threading.Semaphore(1))
    release = threading.Event()
    user = Userland(lambda task: release.wait(), "agent", ("task",), ())
    calls = [asyncio.ensure_future(user.call({}, timeout=30, extras={})) for _ in range(3)]
    await asyncio.sleep(0.1)
    for call in calls:
        call.cancel()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    release.set()
    assert [type(e) for e in ends] == [asyncio.CancelledError] * 3


class Judge:
    async def __call__(self, task, result, *, trajectory):
        return trajectory

    def method(self, task, result, session=None):
        return session


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda task, result: 0, 0),
        (lambda anything, goes: 0, 0),
        (lambda *args: len(args), 2),
        (lambda task, result, session: session, 7),
        (lambda task, result, *, trajectory: trajectory, 8),
        (lambda task, result, other=3: other, 3),
        (lambda task, result, **rest: len(rest), 2),
        (functools.partial(lambda weight, task, result, session: session * weight, 2), 14),
        (Judge(), 8),
        (Judge().method, 7),
        (max, 2),
    ],
)
async def test_a_function_gets_what_it_asks_for_by_name(fn, expected):
    reward, _ = await run(fn, task=1, result=2, session=7, trajectory=8)
    assert reward.value == expected


@pytest.mark.parametrize(
    ("fn", "sentence"),
    [
        (3, r"the reward is a int \(3\); it must be a function reward\(task, result\)"),
        (lambda task: 0, r"takes 1 arguments; it must be a function reward\(task, result\)"),
        (
            lambda task, result, foo, session: 0,
            "needs foo, which nobody provides.*session, trajectory by name",
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_a_sentence_up_front(fn, sentence):
    with pytest.raises(ConfigError, match=sentence):
        RewardRunner(fn, 1.0)


def test_exact_match():
    reward = exact_match("answer")
    assert reward({"answer": "Forty  Two"}, " forty two\n") == 1.0
    assert reward({"answer": 42}, "42") == 1.0
    assert reward({"answer": 42}, "43") == 0.0
    assert reward({"answer": "None"}, None) == 0.0
    assert reward({"question": "no truth here"}, "42") is None
    assert exact_match(normalise=False)({"answer": "A"}, "a") == 0.0
