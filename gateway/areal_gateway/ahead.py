"""Preparing a request off the event loop where much text has to be tokenised: 16 000 tokens take some 35 ms,
in which no other session would be served.

Invariant: a call is attached to the tree as it is when the call starts. What was prepared while others went on
counts only as long as the tree has not changed; otherwise it is prepared again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from areal_gateway.canonical import text_of
from areal_gateway.exchange import CallRequest
from areal_gateway.prepare import Prepared, bridged, place, prepare_all, ready
from areal_gateway.sessions import Session
from areal_gateway.tokens import Tokens

LONG_CHARS = 8_000
"""Text longer than this is tokenised in a thread: about 2 000 tokens, or 4 ms; a thread costs some 0.2 ms."""

TRIES = 3
"""Times that a tree may change under a request before it is prepared in one go."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """Prepared against the tree's `changes`."""

    changes: int
    prepared: list[Prepared]

    def holds(self, session: Session) -> bool:
        return self.changes == session.tree.changes


async def prepare_ahead(tokens: Tokens, session: Session, request: CallRequest) -> Ahead:
    """Raises GatewayError (400)."""
    for _ in range(TRIES):
        changes = session.tree.changes
        if (prepared := _at_once(tokens, session, request)) is not None:
            return Ahead(changes, prepared)
        ahead = Ahead(changes, await asyncio.to_thread(prepare_all, tokens, session, request))
        if ahead.holds(session):
            return ahead
    return Ahead(session.tree.changes, prepare_all(tokens, session, request))


async def count_tokens(tokens: Tokens, session: Session, request: CallRequest) -> int:
    """Tokens that the prompt would have, were it asked now. Raises GatewayError (400)."""
    if _chars(request.messages) > LONG_CHARS:
        return len((await asyncio.to_thread(place, tokens, session, request))[1])
    return len(place(tokens, session, request)[1])


def _at_once(tokens: Tokens, session: Session, request: CallRequest) -> list[Prepared] | None:
    """Prepared where little text has to be tokenised, else None."""
    if request.prompts:
        short = sum(len(p) for p in request.prompts if isinstance(p, str)) <= LONG_CHARS
        return prepare_all(tokens, session, request) if short else None
    if _chars(request.messages) <= LONG_CHARS:
        return prepare_all(tokens, session, request)
    if tokens.bridges_whole:
        return None
    attachment = session.tree.attach(request.messages, request.tools, request.after)
    if attachment.parent is None or _chars(attachment.new_messages) > LONG_CHARS:
        return None
    placed = bridged(tokens, attachment, request)
    return None if placed is None else [ready(tokens, session, request, placed)]


def _chars(messages: Iterable[dict[str, Any]]) -> int:
    return sum(len(t) for m in messages if isinstance(t := text_of(m.get("content")), str))
