"""What `benchmarks/interrupt.py` computes beside its measurements: the loss of waiting for the longest reply."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import islice, repeat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from _replies import LONGEST, Computed, Engine, Measured, constant, lengths, visit


def replies(*slots: list[int]) -> list[Iterator[int]]:
    return [iter([*own, *repeat(10, 10000)]) for own in slots]


def test_a_drain_by_hand() -> None:
    """Two engines of two slots. At 4 s: 6 and 1 left on one (it began with 3, then 2), 16 and 4 on the other."""
    keep, drain = (
        visit(
            replies([10], [20], [3, 2], [8]),
            engines=2,
            step=constant,
            settle_s=4,
            interval_s=40,
            windows=1,
            drain=drain,
        )[0]
        for drain in (False, True)
    )
    assert (keep.tokens, keep.seconds, keep.drained_s) == (4 * 40, 40, 0)
    assert (drain.drained_s, drain.seconds) == (16, 40)
    assert drain.idle_s == (16 - 6) + (16 - 1) + 0 + (16 - 4)
    assert drain.tokens == (6 + 1 + 16 + 4) + 4 * (40 - 16)


def test_a_drain_longer_than_the_interval_makes_the_window_longer() -> None:
    (window,) = visit(
        replies([50], [5]), engines=1, step=constant, settle_s=1, interval_s=20, windows=1, drain=True
    )
    assert (window.seconds, window.drained_s, window.tokens) == (49, 49, 49 + 4)


def test_a_lone_reply_is_as_much_faster_as_its_steps_are_shorter() -> None:
    step = Measured([(1, 0.5), (2, 1.0)])
    engine = Engine(replies([4], [10]), step)
    assert engine.run(0.0, admit=True) == (0, 0)
    engine.run(1.0, admit=True)
    assert engine.run(math.inf, admit=False) == (3 + 9, 3 * 1.0 + 6 * 0.5)


@pytest.mark.parametrize(("calls", "seconds"), [(0, 2.0), (1, 2.0), (2, 3.0), (3, 4.0), (5, 6.0), (9, 6.0)])
def test_between_measured_step_times_are_straight_lines(calls: int, seconds: float) -> None:
    assert Measured([(1, 2.0), (3, 4.0), (5, 6.0)])(calls) == seconds


@settings(deadline=None)
@given(
    seed=st.integers(0, 100),
    slots=st.integers(1, 6),
    engines=st.integers(1, 2),
    interval=st.floats(50, 2000),
)
def test_every_slot_second_is_a_token_or_idle(seed: int, slots: int, engines: int, interval: float) -> None:
    slots = max(slots, engines)

    def run(drain: bool) -> list[Computed]:
        own = [lengths(30, f"{seed}/{i}") for i in range(slots)]
        return visit(own, engines, constant, settle_s=100, interval_s=interval, windows=3, drain=drain)

    for kept, drained in zip(run(False), run(True), strict=True):
        assert kept.tokens == pytest.approx(slots * kept.seconds)
        assert drained.tokens + drained.idle_s == pytest.approx(slots * drained.seconds)
        assert drained.seconds == max(interval, drained.drained_s)


def test_lengths_have_the_mean_they_are_asked_for_and_a_long_tail() -> None:
    some = list(islice(lengths(100, "a"), 20000))
    mean = sum(some) / len(some)
    assert 90 < mean < 102, "the cut takes a little"
    assert max(some) == LONGEST * 100
    assert sorted(some)[len(some) // 2] < mean / 1.8
    assert some[:100] == list(islice(lengths(100, "a"), 100)) != list(islice(lengths(100, "b"), 100))
