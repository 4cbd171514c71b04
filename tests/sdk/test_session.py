"""The admin plane's client: deadlines, clear errors, and repeats only where they are harmless."""

from __future__ import annotations

import httpx
import pytest
from standin_gateway import ADMIN

from areal_agent import session as module
from areal_agent.errors import GatewayError
from areal_agent.observe import bind, observe, unobserve
from areal_agent.session import GatewayClient


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.001)


async def test_open_reward_seal_inspect(client, standin):
    session = await client.open_session(
        "7", group_id="g", group_size=2, sampling={"temperature": 0.0}, deadline_s=9
    )
    assert session.base_url == f"{standin.url}/v1"
    assert (session.task_id, session.group_id, session.deadline_s) == ("7", "g", 9)
    assert session.api_key not in repr(session)
    await session.reward(0.0, key="a")
    await session.reward(1, key="b")
    sealed = await session.seal("finished")
    assert (sealed.reward_state, sealed.reward, sealed.calls_total) == ("set", 1, 0)
    assert not sealed.trainable, "a reward without a trainable token trains nothing"
    assert await session.seal("failed") == sealed
    assert (await session.inspect(trajectory=True))["sequences"] == []


async def test_a_refusal_carries_status_code_and_words(client):
    session = await client.open_session("7")
    await session.seal()
    with pytest.raises(GatewayError, match=r"refused POST .* status 409: sealed") as e:
        await session.reward(1.0)
    assert (e.value.status, e.value.code) == (409, "session_sealed")


async def test_a_wrong_admin_key_is_said(standin):
    async with GatewayClient(standin.url, "wrong") as c:
        with pytest.raises(GatewayError, match="401") as e:
            await c.status()
    assert e.value.code == "unauthorized"


async def test_nobody_there_is_a_sentence_and_unhealthy():
    async with GatewayClient("http://127.0.0.1:9", "k") as c:
        assert not await c.healthy()
        with pytest.raises(GatewayError, match="did not answer GET /admin/status") as e:
            await c.status()
    assert (e.value.status, e.value.code) == (0, "unreachable")


async def test_a_lost_answer_is_asked_for_again_where_that_is_harmless(client, standin):
    session = await client.open_session("7")
    standin.fail_next = [0, 0]
    await session.reward(1.0, key="a")
    standin.fail_next = [0]
    assert (await session.seal()).reward == 1.0


async def test_opening_is_never_repeated_once_the_request_was_sent(client, standin):
    """A second session in the group would never be sealed, and the group never be ready."""
    standin.fail_next = [0]
    with pytest.raises(GatewayError, match="did not answer POST /admin/sessions"):
        await client.open_session("7")
    assert standin.sessions == {}
    assert standin.fail_next == []


async def test_a_deadline_ends_every_request():
    async def never(request):
        raise httpx.ReadTimeout("")

    async with GatewayClient("http://gateway", ADMIN, transport=httpx.MockTransport(never)) as c:
        with pytest.raises(GatewayError, match="ReadTimeout"):
            await c.status()


async def test_an_answer_that_is_no_json_is_an_error():
    transport = httpx.MockTransport(lambda r: httpx.Response(200, text="<html>"))
    async with GatewayClient("http://gateway", ADMIN, transport=transport) as c:
        with pytest.raises(GatewayError, match="<html>"):
            await c.status()


async def test_the_admin_key_is_used_inside_a_session_as_well(client):
    observe()
    try:
        session = await client.open_session("7")
        with bind(session.base_url, session.api_key):
            await session.reward(1.0)
            assert (await client.status())["version"] == 0
    finally:
        unobserve()
