"""Online mode: a service with one key, its conversations as sessions, its feedback as rewards."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_support import ADMIN_KEY, PROJECT_KEY, Served, make_app
from openai import AsyncOpenAI, InternalServerError

from areal_agent.wire import unpack
from areal_gateway.ledger import LedgerError
from areal_gateway.tokens import Tokens

SETTINGS: Any = {"online": {"enabled": True}, "rollout": {"group_size": 2}}


@pytest.fixture
async def online(tokens: Tokens, tmp_path: Path) -> AsyncIterator[Served]:
    served = make_app(tokens, tmp_path, **SETTINGS)
    await served.start()
    yield served
    await served.stop()


def service(served: Served, **options: Any) -> AsyncOpenAI:
    client = AsyncOpenAI(base_url=served.url + "/v1", api_key=PROJECT_KEY, **options)
    served.clients.append(client)
    return client


async def chat(client: AsyncOpenAI, *texts: str, name: str | None = None) -> Any:
    roles = ("user", "assistant")
    messages: Any = [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]
    headers = {"x-areal-session": name} if name else {}
    return await client.chat.completions.create(model="any", messages=messages, extra_headers=headers)


async def reward(served: Served, body: Any, name: str | None = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {PROJECT_KEY}"} | ({"x-areal-session": name} if name else {})
    async with served.http.post(served.url + "/v1/rewards", json=body, headers=headers) as r:
        return r.status, await r.json()


def calls_per_session(served: Served) -> list[int]:
    return [len(s.history.calls) for s in served.gateway.sessions.running()]


async def test_sessions_are_told_apart_by_the_header(online: Served) -> None:
    client = service(online)
    await asyncio.gather(*(chat(client, "hi", name=n) for n in ("a", "a", "b", "a")))
    assert sorted(calls_per_session(online)) == [1, 3]


async def test_without_a_header_a_conversation_is_a_session(online: Served) -> None:
    client = service(online)
    first = (await chat(client, "hello")).choices[0].message.content
    other = (await chat(client, "good day")).choices[0].message.content
    await chat(client, "hello", first, "go on")
    assert calls_per_session(online) == [2, 1]
    await chat(client, "good day", other, "and you?")
    await chat(client, "something else")
    assert calls_per_session(online) == [2, 2, 1]


async def test_previous_response_id_finds_its_session(online: Served) -> None:
    client = service(online)
    first = await client.responses.create(model="any", input="hello")
    await client.responses.create(model="any", input="go on", previous_response_id=first.id)
    assert calls_per_session(online) == [2]
    (session,) = online.gateway.sessions.running()
    assert session.history.calls[1].parent_id == session.history.calls[0].call_id


async def test_a_retry_without_a_header_makes_no_second_session(online: Served) -> None:
    client = service(online)
    for _ in range(2):
        await client.with_options(default_headers={"Idempotency-Key": "k"}).chat.completions.create(
            model="any", messages=[{"role": "user", "content": "hi"}]
        )
    assert calls_per_session(online) == [1]


async def test_the_sessions_reward_closes_it_and_the_name_begins_anew(online: Served) -> None:
    client = service(online)
    await chat(client, "hi", name="a")
    (before,) = online.gateway.sessions.running()
    body = {"value": 1.0, "key": "thumb"}
    assert await reward(online, body, "a") == (200, {"session_id": before.id})
    assert online.gateway.sessions.open_count == 0
    assert await reward(online, body, "a") == (200, {"session_id": before.id})  # its answer was lost
    assert (await reward(online, {"value": 0.0, "key": "late"}, "a"))[0] == 409
    await chat(client, "hi", name="a")
    (after,) = online.gateway.sessions.running()
    assert after.id != before.id
    history = await online.gateway.sessions.history(before.id)
    assert [r.value for r in history.rewards] == [1.0]


async def test_feedback_on_a_reply_leaves_it_open_unless_final(online: Served) -> None:
    client = service(online)
    reply = await chat(client, "hi")
    assert (await reward(online, {"value": 0.5, "response_id": reply.id, "key": "1"}))[0] == 200
    assert online.gateway.sessions.open_count == 1
    final = {"value": 0.75, "response_id": reply.id, "key": "2", "final": True}
    assert (await reward(online, final))[0] == 200
    assert online.gateway.sessions.open_count == 0
    assert (await reward(online, final))[0] == 200
    assert (await reward(online, {"value": 1.0, "response_id": reply.id}))[0] == 409
    assert (await reward(online, {"value": 1.0, "response_id": "chatcmpl-none"}))[0] == 404
    assert (await reward(online, {"value": 1.0}))[0] == 400


async def test_an_idle_conversation_is_closed_with_what_it_earned(online: Served) -> None:
    reply = await chat(service(online), "hi")
    await reward(online, {"value": 0.5, "response_id": reply.id})
    (session,) = online.gateway.sessions.running()
    await online.gateway.sessions._seal_if_idle(session, session.active_at + 599)
    assert online.gateway.sessions.open_count == 1
    await online.gateway.sessions._seal_if_idle(session, session.active_at + 601)
    seal = (await online.gateway.sessions.history(session.id)).seal
    assert seal is not None
    assert seal.reward == 0.5


async def test_cohorts_reach_the_trainer_also_across_a_restart(tokens: Tokens, tmp_path: Path) -> None:
    served = make_app(tokens, tmp_path, **SETTINGS)
    await served.start()
    for name in "abc":
        await chat(service(served), "hi", name=name)
    await served.stop()
    served = make_app(tokens, tmp_path, **SETTINGS)
    await served.start()
    await chat(service(served), "hi", name="d")  # fills the cohort that c began
    for value, name in enumerate("abcd"):
        assert (await reward(served, {"value": float(value)}, name))[0] == 200
    async with served.http.post(
        served.url + "/admin/trajectories/lease",
        json={"groups": 2, "max_staleness": 0},
        headers={"Authorization": f"Bearer {ADMIN_KEY}"},
    ) as r:
        assert r.status == 200
        batch = unpack(await r.read())
    groups: dict[str, list[float | None]] = {}
    for s in batch.sequences:
        groups.setdefault(s.group_id, []).append(s.reward)
    assert list(groups.values()) == [[0.0, 1.0], [2.0, 3.0]]
    await served.stop()


async def test_the_project_key_is_no_other_key(online: Served, tokens: Tokens, tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {PROJECT_KEY}"}
    async with online.http.get(online.url + "/admin/status", headers=headers) as r:
        assert r.status == 401
    off = make_app(tokens, tmp_path / "off")
    await off.start()
    async with off.http.get(off.url + "/v1/models", headers=headers) as r:
        assert r.status == 401
    await off.stop()


async def test_tokens_are_counted_without_opening_a_session(online: Served) -> None:
    headers = {"x-api-key": PROJECT_KEY}
    body = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
    async with online.http.post(online.url + "/v1/messages/count_tokens", json=body, headers=headers) as r:
        assert r.status == 200
        assert (await r.json())["input_tokens"] > 0
    assert online.gateway.sessions.open_count == 0


async def test_the_example_service_is_recorded_and_closed_by_its_users(online: Served) -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples/agents/online_service.py"))
    client = service(online)
    talks = [
        example["conversation"](client, f"u{n}", ["Hello!", "And now?"], lambda _: 0.5) for n in range(2)
    ]
    await asyncio.gather(*talks)
    assert online.gateway.sessions.open_count == 0
    batch = await online.gateway.leases.lease(
        want=1, max_staleness=0, wait_s=0.0, lease_s=60.0, version=lambda: 0
    )
    assert batch is not None
    assert [(s.reward, s.call_rewards, len(s.call_ids)) for s in batch.sequences] == [
        (0.5, (0.5, 0.5), 2)
    ] * 2


async def test_a_session_that_could_not_be_opened_takes_no_place_in_its_cohort(
    online: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = online.gateway.sessions
    original = sessions.open

    async def fails(**_: Any) -> Any:
        raise LedgerError("the disk is full")

    client = service(online, max_retries=0)
    monkeypatch.setattr(sessions, "open", fails)
    with pytest.raises(InternalServerError):
        await chat(client, "one")
    monkeypatch.setattr(sessions, "open", original)
    for text in ("two", "three"):
        await chat(client, text)
    assert len({s.record.group_id for s in sessions.running()}) == 1


async def test_past_its_deadline_a_name_begins_anew(online: Served) -> None:
    client = service(online, max_retries=0)
    await chat(client, "hi", name="a")
    (first,) = online.gateway.sessions.running()
    first.record = replace(first.record, opened_at=first.record.opened_at - first.record.deadline_s)
    await chat(client, "hi", name="a")
    assert sorted(calls_per_session(online)) == [1, 1]
