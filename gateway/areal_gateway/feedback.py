"""A reward as both planes take it. Invariant: what a body is about is found before anything is written, so a
refused one changes nothing."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from areal_agent.errors import GatewayError
from areal_gateway.credit import REWARD
from areal_gateway.exchange import exchange_id_of
from areal_gateway.fields import bad, integer, labels, reward_value, text
from areal_gateway.records import SessionHistory
from areal_gateway.sessions import Sessions


async def give(sessions: Sessions, session_id: str, body: dict[str, Any]) -> SessionHistory:
    """{value, key?, name?} and at most one of {response_id, index?}, {call_id}, {labels} -> the session's history.

    Without a key the reward is a fact of its own, however often it is sent.
    Raises GatewayError: 400 cannot be read, 404 no such session, response or call, 409 the session is sealed.
    """
    call_id = text(body, "call_id", "") or None
    about = labels(body)
    if (response_id := text(body, "response_id", "")) != "":
        if call_id is not None:
            raise bad("name the reply by response_id or by call_id, not by both")
        history = await sessions.history(session_id)
        call_id = call_of(history, response_id, integer(body, "index", 0, low=0, high=4096))
    return await sessions.reward(
        session_id,
        key=text(body, "key", "") or uuid4().hex,
        name=text(body, "name", REWARD),
        value=reward_value(body),
        call_id=call_id,
        labels=about,
    )


def call_of(history: SessionHistory, response_id: str, index: int) -> str:
    """The call of a response's choice `index`. Raises GatewayError (404)."""
    exchange_id = exchange_id_of(response_id)
    for call in history.calls:
        if (call.exchange_id == exchange_id and call.index == index) or call.call_id == exchange_id:
            return call.call_id
    raise GatewayError(
        f"this session has no response {response_id!r} with a choice {index}",
        status=404,
        code="unknown_response",
    )
