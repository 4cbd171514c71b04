"""The fold, against an oracle written the other way round: per call and per token instead of per branch."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_gateway.records import CallRecord, CallState, Sampling, SessionHistory, SessionRecord, floats, ints
from areal_gateway.trajectories import fold

SESSION = SessionRecord("s", b"k", "t", "g", 1, "train", Sampling(temperature=0.8), 1.0, {}, 0, 0.0, 0)


@st.composite
def histories(draw: st.DrawFn) -> SessionHistory:
    """A random forest of calls. Token ids are unique in the session, so a token names its call."""
    n = draw(st.integers(0, 12))
    history = SessionHistory(SESSION)
    lengths: list[int] = []
    fresh = iter(range(1, 100_000))
    for i in range(n):
        replied = [j for j in range(i) if history.calls[j].state in ("complete", "truncated", "incomplete")]
        parent = draw(st.one_of(st.none(), st.sampled_from(replied))) if replied else None
        state = draw(st.sampled_from(list(CallState)))
        suffix = ints([next(fresh) for _ in range(draw(st.integers(1, 4)))])
        output = ints([next(fresh) for _ in range(draw(st.integers(0, 5)))])
        cuts = sorted(draw(st.sets(st.integers(1, max(1, len(output) - 1)), max_size=2)) if output else set())
        cuts = [c for c in cuts if c < len(output)]
        edges = [0, *cuts, len(output)] if output else []
        spans = tuple((a, b, draw(st.integers(0, 9))) for a, b in pairwise(edges))
        shared = lengths[parent] if parent is not None else 0
        exact = state in (CallState.COMPLETE, CallState.TRUNCATED)
        history.calls.append(
            CallRecord(
                call_id=f"c{i}",
                session_id="s",
                exchange_id=f"e{i}",
                index=0,
                parent_id=f"c{parent}" if parent is not None else None,
                cause=None,
                state=state,
                reason=None,
                finish_reason=None,
                dialect="",
                digest=b"",
                retry_key=None,
                labels={},
                messages=[],
                tools=[],
                reply=None,
                shared=shared,
                suffix_ids=suffix,
                output_ids=output,
                logprobs=floats([-t / 8 for t in output]) if exact else floats([None] * len(output)),
                spans=spans if exact else (),
                temperature=0.8,
                max_tokens=1,
                seed=None,
                started_at=0.0,
                ended_at=0.0,
            )
        )
        lengths.append(shared + len(suffix) + len(output))
        if draw(st.booleans()):
            history.delivered.add(f"c{i}")
    return history


def is_trained(history: SessionHistory, call: CallRecord) -> bool:
    """The rule in words: exact, not empty, and known to have reached the agent."""
    if call.state not in (CallState.COMPLETE, CallState.TRUNCATED) or not len(call.output_ids):
        return False
    reached = call.call_id in history.delivered
    return reached or any(c.parent_id == call.call_id for c in history.calls)


@given(histories())
def test_every_token_of_a_trained_call_carries_loss_exactly_once(history: SessionHistory) -> None:
    trained = Counter(
        t for s in fold(history, 1.0).sequences for t, m in zip(s.token_ids, s.loss_mask, strict=True) if m
    )
    expected = Counter(t for c in history.calls if is_trained(history, c) for t in c.output_ids)
    assert trained == expected


@given(histories())
def test_every_token_stands_after_what_the_engine_saw_before_it(history: SessionHistory) -> None:
    """Rebuilt per call by walking to the root: the context of each sequence is a call's own, in full."""
    calls = {c.call_id: c for c in history.calls}

    def context(call: CallRecord) -> list[int]:
        before = context(calls[call.parent_id]) if call.parent_id else []
        return [*before, *call.suffix_ids, *call.output_ids]

    for s in fold(history, None).sequences:
        assert list(s.token_ids) == context(calls[s.call_ids[-1]])


@given(histories())
def test_each_token_has_its_own_logprob_and_version(history: SessionHistory) -> None:
    version_of = {t: v for c in history.calls for a, b, v in c.spans for t in list(c.output_ids)[a:b]}
    sampled_exactly = {t for c in history.calls if c.state in ("complete", "truncated") for t in c.output_ids}
    for s in fold(history, 0.0).sequences:
        for token, logprob, version in zip(s.token_ids, s.logprobs, s.versions, strict=True):
            if token in sampled_exactly:
                assert (logprob, version) == (pytest.approx(-token / 8), version_of[token])
            else:
                assert (logprob, version) == (0.0, -1)


@given(histories())
def test_no_sequence_is_part_of_another(history: SessionHistory) -> None:
    sequences = fold(history, 0.0).sequences
    for a in sequences:
        assert a.trained_tokens > 0
        for b in sequences:
            assert a is b or list(b.token_ids[: len(a)]) != list(a.token_ids)


def test_the_reward_and_the_names_are_the_sessions() -> None:
    history = SessionHistory(SESSION)
    assert fold(history, None).sequences == ()
    assert fold(history, 0.5).reward == 0.5
