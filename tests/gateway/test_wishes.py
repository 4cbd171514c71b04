"""`sampling.pinned: false`: a call's own sampling reaches the engine, and the trainer gets each temperature as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_support import Served, make_app

from areal_gateway.tokens import Tokens

ASK = [{"role": "user", "content": "What is two plus three?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/completions": {"prompt": "two"},
    "/v1/responses": {"input": "two?"},
    "/v1/messages": {"messages": ASK, "max_tokens": 50},
}


@pytest.fixture
async def free(tokens: Tokens, tmp_path: Path) -> AsyncIterator[Served]:
    served = make_app(tokens, tmp_path, sampling={"pinned": False, "temperature": 0.8})
    await served.start()
    yield served
    await served.stop()


@pytest.mark.parametrize("path", BODIES)
async def test_every_api_may_choose_a_temperature_and_is_trained_at_it(free: Served, path: str) -> None:
    session = await free.open()
    status, headers, _ = await free.post(session, BODIES[path] | {"temperature": 0.5, "top_p": 1}, path=path)
    assert status == 200
    assert "x-areal-ignored" not in headers
    await free.post(session, BODIES[path], path=path)
    assert [a.sampling.temperature for a in free.fleet.asked] == [0.5, 0.8]
    body = await free.inspect(session, trajectory=True)
    assert [s["temperature"] for s in body["sequences"]] == [0.5, 0.8]
    assert body["counts"] == {"complete": 2}


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ({"temperature": 0}, "temperature of 0 leaves no distribution"),
        ({"temperature": 0.005}, "temperature of 0.005 leaves no distribution"),
        ({"top_p": 0.9}, "top_p 0.9 and top_k 0 cut"),
        ({"top_k": 40}, "top_p 1 and top_k 40 cut"),
    ],
)
async def test_what_the_trainer_cannot_compute_is_context_and_says_why(
    free: Served, wish: dict[str, Any], why: str
) -> None:
    session = await free.open()
    assert (await free.post(session, {"messages": ASK, **wish}))[0] == 200
    (asked,) = free.fleet.asked
    assert all(getattr(asked.sampling, name) == value for name, value in wish.items())
    body = await free.inspect(session, trajectory=True)
    assert body["counts"] == {"constrained": 1}
    assert why in body["calls"][0]["incomplete_reason"]
    assert body["sequences"] == []


@pytest.mark.parametrize("wish", [{"temperature": 3}, {"temperature": "hot"}, {"top_p": 0}, {"top_k": 1.5}])
async def test_a_wish_that_cannot_be_read_is_a_400(free: Served, wish: dict[str, Any]) -> None:
    status, _, body = await free.post(await free.open(), {"messages": ASK, **wish})
    assert (status, next(iter(wish)) in body["error"]["message"]) == (400, True)


async def test_a_conversation_at_two_temperatures_is_a_sequence_for_each(free: Served) -> None:
    """Every sampled token is trained once, at the temperature it was sampled at, after the ids it followed."""
    session = await free.open()
    messages: list[Any] = list(ASK)
    for temperature in (0.5, 1.0, 0.5):
        _, _, reply = await free.post(session, {"messages": messages, "temperature": temperature})
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "And?"}]
    first, second, third = free.fleet.asked
    low, high = (await free.inspect(session, trajectory=True))["sequences"]
    assert (low["temperature"], high["temperature"]) == (0.5, 1.0)
    assert low["token_ids"] == third.prompt_ids + third.output_ids
    assert high["token_ids"] == second.prompt_ids + second.output_ids
    trained = [[t for t, m in zip(s["token_ids"], s["loss_mask"], strict=True) if m] for s in (low, high)]
    assert trained == [first.output_ids + third.output_ids, second.output_ids]
    assert [len(s["call_ids"]) for s in (low, high)] == [3, 2]
    assert high["call_ends"][-1] == len(high["token_ids"])


async def test_an_evaluation_is_sampled_as_it_was_opened(free: Served) -> None:
    session = await free.open(purpose="eval", sampling={"temperature": 0})
    await free.post(session, {"messages": ASK, "temperature": 1.5})
    assert free.fleet.asked[0].sampling.temperature == 0
    assert (await free.inspect(session))["counts"] == {"complete": 1}


async def test_a_pinned_run_says_that_the_wish_had_no_effect(served: Served) -> None:
    _, headers, _ = await served.post(
        await served.open(), {"messages": ASK, "temperature": 0.5, "top_p": 0.9}
    )
    assert headers["x-areal-ignored"] == "temperature, top_p"
    assert (served.fleet.asked[0].sampling.temperature, served.fleet.asked[0].sampling.top_p) == (1.0, 1.0)
