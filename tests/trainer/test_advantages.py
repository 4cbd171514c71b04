"""GRPO advantages: the numbers of the module's docstring, and what must not change them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_trainers.algorithm.advantages import group_advantages
from areal_trainers.algorithm.rewards import EPSILON


def of(*rewards: float | None, deviation: bool = True) -> list[float | None]:
    sessions = {str(i): r for i, r in enumerate(rewards)}
    got = group_advantages(sessions, dict.fromkeys(sessions, "g"), deviation=deviation)
    return [got.get(s) for s in sessions]


def test_one_success_in_four() -> None:
    assert of(1, 0, 0, 0) == pytest.approx([1.732, -0.577, -0.577, -0.577], abs=1e-3)


def test_a_missing_reward_is_left_out_and_is_not_zero() -> None:
    assert of(1, 0, None)[:2] == pytest.approx([1, -1], abs=1e-5)
    assert of(1, 0, None)[2] is None


def test_equal_rewards_have_nothing_to_compare() -> None:
    # 0.1 is not exact in binary: the mean of three of them differs from it by rounding.
    assert of(0.1, 0.1, 0.1) == [0.0, 0.0, 0.0]


def test_a_singleton_has_nothing_to_be_compared_with() -> None:
    assert of(1, None, None) == [0.0, None, None]


def test_without_the_deviation_only_centred() -> None:
    assert of(3, 1, deviation=False) == pytest.approx([1, -1])


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=4),
        st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.sampled_from([0.0, 0.25, 1.0, -2.0]))),
        max_size=12,
    )
)
def test_agrees_with_a_plain_computation(sessions: dict[str, tuple[str, float | None]]) -> None:
    got = group_advantages({s: r for s, (_, r) in sessions.items()}, {s: g for s, (g, _) in sessions.items()})
    for session, (group, reward) in sessions.items():
        if reward is None:
            assert session not in got
            continue
        peers = [r for g, r in sessions.values() if g == group and r is not None]
        mean = math.fsum(peers) / len(peers)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in peers) / len(peers))
        assert got[session] == pytest.approx((reward - mean) / (std + EPSILON), abs=1e-9)
