"""Rewards and what they come to: per session, per call, per label, along the tree and nowhere else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_support import ADMIN_KEY, Served, make_app
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.session import GatewayClient
from areal_agent.wire import unpack
from areal_gateway.credit import Credit
from areal_gateway.records import (
    CallRecord,
    CallState,
    RewardRecord,
    Sampling,
    SessionHistory,
    SessionRecord,
    floats,
    ints,
)
from areal_gateway.tokens import Tokens
from areal_gateway.trajectories import fold

SESSION = SessionRecord("s", b"k", "t", "g", 1, "train", Sampling(), 1.0, {"team": "red"}, 0, 0.0, 0)


def tree(*parents: int | None, labels: dict[int, dict[str, str]] | None = None) -> SessionHistory:
    """Call i continues call parents[i]; each has one prompt token beyond it and two sampled ones."""
    history, lengths = SessionHistory(SESSION), []
    for i, parent in enumerate(parents):
        shared = 0 if parent is None else lengths[parent]
        history.calls.append(
            CallRecord(
                *(f"c{i}", "s", f"e{i}", 0, None if parent is None else f"c{parent}", None),
                *(CallState.COMPLETE, None, "stop", "", b"", None, (labels or {}).get(i, {}), [], [], {}),
                *(shared, ints([3 * i]), ints([3 * i + 1, 3 * i + 2]), floats([-1.0, -2.0]), ((0, 2, 0),)),
                *(1.0, 2, None, 0.0, 0.0),
            )
        )
        lengths.append(shared + 3)
        history.delivered.add(f"c{i}")
    return history


def reward(value: float | None, key: str = "k", call: int | None = None, **labels: str) -> RewardRecord:
    return RewardRecord("s", key, "reward", value, None if call is None else f"c{call}", 0.0, labels)


def test_a_call_that_got_no_reply_earns_nothing_by_its_labels_and_continues_nothing() -> None:
    """The second of three failed and was asked again: the third."""
    solver = {"role": "solver"}
    history = tree(None, 0, 0, labels={1: solver, 2: solver})
    history.calls[1] = replace(history.calls[1], state=CallState.FAILED)
    history.rewards.append(reward(1.0, role="solver"))
    assert Credit().of_session(history) == ("set", 1.0)
    assert Credit(turn_discount=0.5).returns(history, 1.0) == {"c0": 0.5, "c1": None, "c2": 1.0}
    history.rewards.append(reward(4.0, key="whole"))
    assert Credit().returns(history, 4.0) == {"c0": 5.0, "c1": None, "c2": 5.0}


class TestCombination:
    @pytest.mark.parametrize(
        ("given", "last", "total"),
        [
            ([], ("pending", None), ("pending", None)),
            ([("a", 1.0)], ("set", 1.0), ("set", 1.0)),
            ([("a", 1.0), ("b", 0.25)], ("set", 0.25), ("set", 1.25)),
            ([("a", 1.0), ("a", 0.5)], ("set", 0.5), ("set", 0.5)),  # a key counts once
            ([("a", 1.0), ("b", 2.0), ("a", 0.5)], ("set", 0.5), ("set", 2.5)),
            ([("a", None)], ("missing", None), ("missing", None)),
            ([("a", 1.0), ("b", None)], ("missing", None), ("set", 1.0)),
            ([("a", None), ("b", 0.0)], ("set", 0.0), ("set", 0.0)),
        ],
    )
    def test_of_keys(self, given: Any, last: Any, total: Any) -> None:
        rewards = [reward(value, key) for key, value in given]
        assert Credit("last").combine(rewards) == last
        assert Credit("sum").combine(rewards) == total

    def test_other_names_are_kept_and_do_not_count(self) -> None:
        history = tree(None)
        history.rewards.append(RewardRecord("s", "k", "format", 1.0, None, 0.0))
        assert Credit().of_session(history) == ("pending", None)

    def test_a_session_without_a_reward_of_its_own_earned_what_its_calls_did(self) -> None:
        history = tree(None, 0, None)
        history.rewards.extend([reward(1.0, call=1), reward(0.5, call=2)])
        assert Credit().of_session(history) == ("set", 1.5)
        history.rewards.append(reward(0.0))
        assert Credit().of_session(history) == ("set", 0.0)

    def test_a_label_is_every_call_that_carries_it(self) -> None:
        history = tree(None, 0, None, labels={0: {"role": "solver"}, 2: {"role": "critic"}})
        history.rewards.extend([reward(1.0, role="solver"), reward(0.5, call=0), reward(2.0, team="red")])
        own = Credit().of_calls(history)
        assert own == {"c0": ("set", 3.5), "c1": ("set", 2.0), "c2": ("set", 2.0)}


class TestReturns:
    def test_the_discount_follows_the_tree_not_the_time(self) -> None:
        """Two sub-agents whose calls alternate: neither gets what the other earned."""
        history = tree(None, None, 0, 1)  # a0 b0 a1 b1
        history.rewards.extend([reward(1.0, call=2), reward(-8.0, call=3)])
        assert Credit("last", 0.5).returns(history, None) == {"c0": 0.5, "c1": -4.0, "c2": 1.0, "c3": -8.0}

    def test_what_nobody_spoke_of_is_missing(self) -> None:
        history = tree(None, 0, None)
        history.rewards.append(reward(1.0, call=0))
        assert Credit().returns(history, None) == {"c0": 1.0, "c1": None, "c2": None}

    def test_the_sessions_reward_is_earned_at_the_end_of_every_branch(self) -> None:
        history = tree(None, 0, 1, None)
        history.rewards.append(reward(1.0))
        assert Credit("last", 0.5).returns(history, 1.0) == {"c0": 0.25, "c1": 0.5, "c2": 1.0, "c3": 1.0}
        assert set(Credit().returns(history, 1.0).values()) == {1.0}

    def test_several_continuations_count_by_their_mean(self) -> None:
        history = tree(None, 0, 0, 0)
        history.rewards.extend([reward(1.0, call=1), reward(0.0, call=2)])  # nothing of the third
        assert Credit().returns(history, None)["c0"] == 0.5

    @given(
        parents=st.lists(st.integers(-1, 30), min_size=1, max_size=15),
        values=st.lists(st.none() | st.integers(-4, 4).map(float), min_size=15, max_size=15),
        outcome=st.none() | st.integers(-4, 4).map(float),
        discount=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def test_against_the_definition_read_downwards(
        self, parents: list[int], values: list[float | None], outcome: float | None, discount: float
    ) -> None:
        fathers = [None if p < 0 or i == 0 else p % i for i, p in enumerate(parents)]
        history = tree(*fathers)
        history.rewards.extend(
            [reward(v, call=i) for i, v in enumerate(values[: len(fathers)]) if v is not None]
        )
        if outcome is not None:
            history.rewards.append(reward(outcome))
        found = Credit("last", discount).returns(history, outcome)

        def value(i: int) -> float | None:
            below = [j for j, father in enumerate(fathers) if father == i]
            terms = [] if values[i] is None else [values[i]]
            if below:
                known = [v for j in below if (v := value(j)) is not None]
                terms += [discount * sum(known) / len(known)] if known else []
            elif outcome is not None:
                terms.append(outcome)
            return sum(t for t in terms if t is not None) if terms else None

        for i in range(len(fathers)):
            assert found[f"c{i}"] == (pytest.approx(v) if (v := value(i)) is not None else None)


class TestFold:
    def test_each_calls_reward_stands_at_its_last_token(self) -> None:
        history = tree(None, 0)
        history.rewards.extend([reward(1.0, call=0), reward(2.0, call=1)])
        (sequence,) = fold(history, 3.0, Credit("last", 0.5)).sequences
        assert sequence.token_ids == [0, 1, 2, 3, 4, 5]
        assert (sequence.call_ids, sequence.call_ends) == (("c0", "c1"), (3, 6))
        assert (sequence.call_rewards, sequence.call_returns) == ((1.0, 2.0), (2.0, 2.0))

    def test_only_the_labels_asked_for_are_trained_the_rest_is_context(self) -> None:
        history = tree(None, 0, 1, None, labels={1: {"role": "solver"}, 2: {"role": "critic"}})
        only = Credit(train_labels={"role": ["solver"]})
        (sequence,) = fold(history, 1.0, only).sequences
        assert sequence.call_ids == ("c0", "c1")
        assert sequence.loss_mask == [False] * 4 + [True] * 2
        assert sequence.call_labels == ({"team": "red"}, {"team": "red", "role": "solver"})
        either = fold(history, 1.0, Credit(train_labels={"role": ["solver", "critic"], "team": ["red"]}))
        assert either.trained_tokens == 4
        assert fold(history, 1.0, Credit(train_labels={"team": ["blue"]})).sequences == ()


# -- over HTTP -------------------------------------------------------------------------------------


@pytest.fixture
async def serve(tokens: Tokens, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    running: list[Served] = []

    async def start(**settings: Any) -> Served:
        served = make_app(tokens, tmp_path, **settings)
        await served.start()
        running.append(served)
        return served

    yield start
    for served in running:
        await served.stop()


async def say(served: Served, session: Any, text: str, **labels: str) -> str:
    """One call; its response id."""
    body = {"messages": [{"role": "user", "content": text}]}
    headers = {f"x-areal-label-{k}": v for k, v in labels.items()}
    status, _, answer = await served.post(session, body, headers)
    assert status == 200
    return answer["id"]


async def test_every_way_to_reward_reaches_the_trainer(serve: Callable[..., Any]) -> None:
    served = await serve(rewards={"rule": "sum", "turn_discount": 0.5})
    session = await served.open()
    first = await say(served, session, "one", role="solver")
    second = await say(served, session, "two")
    calls = {c["exchange_id"]: c["call_id"] for c in (await served.inspect(session))["calls"]}
    bearer = {"Authorization": f"Bearer {session['api_key']}"}
    for body in (
        {"value": 0.5, "response_id": first, "key": "thumb"},
        {"value": 0.5, "response_id": first, "key": "thumb"},  # repeated: counts once
    ):
        async with served.http.post(served.url + "/v1/rewards", json=body, headers=bearer) as r:
            assert r.status == 200
    client = GatewayClient(served.url, ADMIN_KEY)
    await client.post(
        f"/admin/sessions/{session['session_id']}/rewards",
        {"value": 1.0, "key": "a", "labels": {"role": "solver"}},
        repeat=True,
    )
    await served.reward(session, 2.0, key="b", call_id=calls[second.removeprefix("chatcmpl-")])
    await served.reward(session, 0.25, key="c")
    await served.reward(session, 0.5, key="d")
    found = {c["call_id"]: c for c in (await served.inspect(session))["calls"]}
    assert sorted(c["reward"] for c in found.values()) == [1.5, 2.0]
    assert {c["reward_state"] for c in found.values()} == {"set"}
    assert (await served.seal(session))["reward"] == 0.75
    async with served.http.post(
        served.url + "/admin/trajectories/lease",
        json={"groups": 1},
        headers={"Authorization": f"Bearer {ADMIN_KEY}"},
    ) as r:
        batch = unpack(await r.read())
    assert [(s.reward, s.call_rewards, s.call_returns) for s in batch.sequences] == [
        (0.75, (1.5,), (2.25,)),
        (0.75, (2.0,), (2.75,)),
    ]
    assert batch.sequences[0].call_labels == ({"role": "solver"},)
    await client.aclose()


async def test_a_reward_of_nothing_is_refused_and_changes_nothing(served: Served) -> None:
    session = await served.open()
    await say(served, session, "one")
    url = f"/admin/sessions/{session['session_id']}/rewards"
    for body, status in (
        ({"value": 1.0, "key": "k", "call_id": "nope"}, 404),
        ({"value": 1.0, "key": "k", "response_id": "chatcmpl-nope"}, 404),
        ({"value": 1.0, "key": "k", "response_id": "x", "call_id": "y"}, 400),
        ({"value": 1.0}, 400),
        ({"key": "k"}, 400),
    ):
        await served.admin("POST", url, body, status)
    assert (await served.inspect(session))["rewards"] == []


async def test_labels_of_the_config_decide_what_is_trained(serve: Callable[..., Any]) -> None:
    served = await serve(rollout={"train_labels": {"role": ["solver"]}})
    session = await served.open()
    await say(served, session, "plan", role="planner")
    await say(served, session, "solve", role="solver")
    inspected = await served.inspect(session, trajectory=True)
    (sequence,) = inspected["sequences"]
    solver = next(c for c in inspected["calls"] if c["labels"] == {"role": "solver"})
    assert sequence["call_ids"] == [solver["call_id"]]
    assert (await served.seal(session, reward=1.0))["trained_tokens"] == solver["usage"]["completion_tokens"]


async def test_an_idle_session_is_sealed_and_a_busy_one_is_not(serve: Callable[..., Any]) -> None:
    served = await serve(rollout={"idle_timeout_s": 0.2})
    session = await served.open()
    await say(served, session, "one")
    (record,) = served.gateway.sessions.running()
    now = record.active_at
    await served.gateway.sessions._seal_if_idle(record, now + 0.1)
    assert served.gateway.sessions.open_count == 1
    await served.gateway.sessions._seal_if_idle(record, now + 0.3)
    status = (await served.inspect(session))["outcome"]
    assert (served.gateway.sessions.open_count, status) == (0, "timeout")
