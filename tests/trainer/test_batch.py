"""From a lease to items, and the checks that stand before a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from areal_agent.config import AlgorithmConfig
from areal_agent.errors import TrainerError
from areal_agent.trajectory import Batch, Sequence
from areal_trainers.algorithm.experience import complete
from areal_trainers.batch import TrainBatch, check_gap, prepare


def seq(session: str, group: str = "g", reward: float | None = 0.0, **over: Any) -> Sequence:
    columns: dict[str, Any] = dict(
        token_ids=[5, 6, 7, 8],
        logprobs=[0.0, 0.0, -1.0, -2.0],
        versions=[-1, -1, 3, 4],
        loss_mask=[False, False, True, True],
        temperature=1.0,
    )
    return Sequence(**(columns | over), reward=reward, session_id=session, group_id=group, task_id="t")


def work(*sequences: Sequence, **kw: Any):
    versions: dict[str, Any] = {"version": 4, "max_staleness": 1}
    return prepare(Batch("lease-7", 4, sequences), **(versions | kw))


def advantages(w: TrainBatch) -> list[float]:
    """First advantage of each item."""
    items = complete(w, AlgorithmConfig(), proximal=[i.columns["behaviour"] for i in w.items]).items
    return [float(i.columns["advantage"][0]) for i in items]


def test_every_branch_of_a_session_has_the_sessions_advantage() -> None:
    w = work(seq("a", reward=1.0), seq("a", reward=1.0), seq("a", reward=1.0), seq("b"))
    assert advantages(w) == pytest.approx([1, 1, 1, -1], abs=1e-5)
    assert w.metrics["reward_mean"] == 0.5  # over sessions, not sequences


def test_a_session_without_reward_trains_nothing() -> None:
    w = work(seq("a", reward=1.0), seq("b"), seq("c", reward=None))
    assert w.sources == (0, 1)
    assert w.metrics["rewards_missing"] == 1


def test_a_session_that_sampled_nothing_still_counts_in_its_group() -> None:
    silent = seq("b", loss_mask=[False] * 4)
    w = work(seq("a", reward=1.0), silent)
    assert w.sources == (0,)
    assert advantages(w) == pytest.approx([1.0], abs=1e-5)


def test_columns_are_of_the_predicted_tokens() -> None:
    item = work(seq("a", reward=1.0), seq("b")).items[0]
    assert item.columns["behaviour"].tolist() == [-1.0, -2.0]
    assert item.columns["version"].tolist() == [3, 4]


def test_staleness_past_the_bound_is_refused() -> None:
    with pytest.raises(TrainerError, match=r"1 versions old.*max_staleness = 0"):
        work(seq("a"), max_staleness=0)


def test_a_batch_of_another_version_is_refused() -> None:
    with pytest.raises(TrainerError, match="cut at version 4 but the trainer holds 5"):
        work(seq("a"), version=5)


def test_a_batch_that_trains_nothing_is_refused() -> None:
    with pytest.raises(TrainerError, match="nothing to train on"):
        work(seq("a", reward=None))


def test_groups_without_any_advantage_are_counted() -> None:
    w = work(seq("a", "x", 1.0), seq("b", "x", 1.0), seq("c", "y", 1.0), seq("d", "y", 0.0))
    assert w.metrics["groups_zero_advantage"] == 0.5


def test_dynamic_sampling_leaves_groups_of_equal_rewards_out() -> None:
    pairs = [("a", "x", 1.0), ("b", "x", 1.0), ("c", "y", 1.0), ("d", "y", 0.0), ("e", "z", 0.5)]
    w = work(*(seq(*p) for p in pairs), dynamic_sampling=True)
    assert w.sources == (2, 3)  # a singleton is a group of equal rewards too
    assert w.metrics["groups_dropped"] == 2
    assert w.metrics["reward_mean"] == 0.7  # of what was sampled, not of what is trained


def test_dynamic_sampling_that_leaves_nothing_is_a_step_without_items() -> None:
    w = work(seq("a", reward=1.0), seq("b", reward=1.0), dynamic_sampling=True)
    assert w.items == ()
    assert complete(w, AlgorithmConfig(), proximal=[]).items == ()
    assert check_gap(w, [], 0.01).tokens == 0


def test_without_logprobs_of_its_own_the_trainer_compares_nothing() -> None:
    assert check_gap(work(seq("a", reward=1.0), seq("b")), None, 0.01).tokens == 0


def test_the_gap_is_taken_on_tokens_of_the_trainers_version_only() -> None:
    w = work(seq("a", reward=1.0), seq("b"))
    ours = [np.array([-9.0, -2.001]), np.array([5.0, -2.0])]  # the first tokens are of version 3
    gap = check_gap(w, ours, 0.01)
    assert gap.value == pytest.approx(0.001)
    assert gap.tokens == 2


def test_a_gap_past_the_bound_names_value_sequence_and_token() -> None:
    w = work(seq("a", reward=None), seq("b", reward=1.0), seq("c"))
    with pytest.raises(TrainerError, match=r"by 0\.5 nats.*sequence 2 \(session c\), token 3 \(id 8\)"):
        check_gap(w, [np.array([-1.0, -2.0]), np.array([-1.0, -2.5])], 0.01)


def test_a_gap_that_is_no_number_is_past_every_bound() -> None:
    with pytest.raises(TrainerError, match="inf nats"):
        check_gap(work(seq("a"), seq("b")), [np.array([-1.0, np.nan]), np.array([-1.0, -2.0])], 1e9)


def test_a_reply_that_branches_share_is_trained_once() -> None:
    """From the ledger's calls to the trainer's items: one session of three branches with a common first turn.

    Counted per branch its reply of 5 tokens would be trained three times: 24 tokens. Trained are 14.
    """
    from areal_agent import wire
    from areal_gateway.records import (
        CallRecord,
        CallState,
        Sampling,
        SessionHistory,
        SessionRecord,
        floats,
        ints,
    )
    from areal_gateway.trajectories import fold

    session = SessionRecord("s", b"k", "t", "g", 1, "train", Sampling(temperature=1.0), 1.0, {}, 0, 0.0, 0)
    history = SessionHistory(session)
    fresh = iter(range(100))

    def call(name: str, parent: str | None, shared: int, prompt: int, reply: int) -> list[int]:
        suffix, output = ([next(fresh) for _ in range(n)] for n in (prompt, reply))
        history.calls.append(
            CallRecord(
                call_id=name, session_id="s", exchange_id=name, index=0, parent_id=parent, cause=None,
                state=CallState.COMPLETE, reason=None, finish_reason="stop", dialect="", digest=b"", retry_key=None,
                labels={}, messages=[], tools=[], reply=None, shared=shared, suffix_ids=ints(suffix),
                output_ids=ints(output), logprobs=floats([-t / 8 for t in output]), spans=((0, reply, 3),),
                temperature=1.0, max_tokens=9, seed=None, started_at=0.0, ended_at=0.0,
            )
        )  # fmt: skip
        history.delivered.add(name)
        return output

    replies = [call("first", None, 0, 4, 5)]
    replies += [call(f"then-{n}", "first", 9, 2, n) for n in (3, 4, 2)]
    leased = wire.unpack(wire.pack(Batch("lease", 3, fold(history, 1.0).sequences)))
    work = prepare(leased, version=3, max_staleness=0)

    trained = [t for i in work.items for t in i.token_ids[i.loss_mask].tolist()]
    assert sorted(trained) == sorted(t for reply in replies for t in reply)
    assert (work.tokens, work.metrics["trained_tokens"], work.session_tokens) == (14, 14, {"s": 14})
    assert [i.predicted for i in work.items] == [5 + 3, 4, 2]
    assert [len(i) for i in work.items] == [14, 15, 13]  # each with its whole context
    behaviour = np.concatenate([i.columns["behaviour"] for i in work.items])
    np.testing.assert_allclose(behaviour, [-t / 8 for t in trained], rtol=1e-6)
