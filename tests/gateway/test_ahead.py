"""Long prompts are prepared beside the event loop, and a call still continues the tree as it is at its start."""

from __future__ import annotations

import asyncio

import pytest
from gateway_support import Served

from areal_gateway import ahead
from areal_gateway.dialects.chat import ChatCompletions
from areal_gateway.prepare import prepare_all

LONG = "7 " * 100


@pytest.fixture(autouse=True)
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "LONG_CHARS", 150)


async def test_the_loop_turns_while_a_long_prompt_is_tokenised(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await opened(served)
    request = ChatCompletions().read({"messages": [{"role": "user", "content": LONG}]}, session)
    turned = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(*args):
        assert not turned.is_set()
        loop.call_soon_threadsafe(turned.set)
        # The loop has to run for this to return: on the loop's own thread it never would.
        asyncio.run_coroutine_threadsafe(turned.wait(), loop).result(20)
        return prepare_all(*args)

    monkeypatch.setattr(ahead, "prepare_all", slow)
    found = await asyncio.wait_for(served.gateway.calls.prepare(session, request), 30)
    assert found.prepared[0].prompt_ids.tolist() == served.gateway.tokens.render(request.messages, [])


async def test_a_call_that_ended_meanwhile_is_continued(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request repeats a long history whose last reply comes while it is being prepared."""
    session = await opened(served)
    asked = [{"role": "user", "content": LONG}]
    served.fleet.say("five")
    first = ChatCompletions().read({"messages": asked}, session)
    before = await served.gateway.calls.prepare(session, first)
    later = ChatCompletions().read(
        {"messages": [*asked, {"role": "assistant", "content": "five"}, {"role": "user", "content": "and?"}]},
        session,
    )
    ended = False
    original = asyncio.to_thread

    async def meanwhile(function, *args):
        nonlocal ended
        prepared = await original(function, *args)
        if not ended:
            ended = True
            exchange = served.gateway.calls.start(session, first, b"1", None, before)
            with exchange.subscribed(patient=False):
                await exchange.wait()
        return prepared

    monkeypatch.setattr(ahead.asyncio, "to_thread", meanwhile)
    found = await served.gateway.calls.prepare(session, later)
    assert found.prepared[0].attachment.parent is not None
    assert found.prepared[0].shared > 0


async def test_what_was_prepared_before_the_tree_changed_is_not_used(served: Served) -> None:
    session = await opened(served)
    asked = [{"role": "user", "content": "2 + 3"}]
    later = ChatCompletions().read(
        {"messages": [*asked, {"role": "assistant", "content": "five"}, {"role": "user", "content": "and?"}]},
        session,
    )
    stale = await served.gateway.calls.prepare(session, later)
    assert stale.prepared[0].attachment.parent is None
    first = ChatCompletions().read({"messages": asked}, session)
    served.fleet.say("five", "six")
    exchange = served.gateway.calls.start(
        session, first, b"1", None, await served.gateway.calls.prepare(session, first)
    )
    with exchange.subscribed(patient=False):
        (parent,) = await exchange.wait()
    exchange = served.gateway.calls.start(session, later, b"2", None, stale)
    with exchange.subscribed(patient=False):
        (child,) = await exchange.wait()
    assert child.parent_id == parent.call_id


async def opened(served: Served):
    session = await served.open()
    found = served.gateway.sessions.get_open(session["session_id"])
    assert found is not None
    return found
