"""What a dialect is: how one HTTP API asks for calls and tells of them.

The core knows no dialect by name. Each is one object in a table from path to Dialect; everything between
`read` and `reply` is common to all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from areal_agent.errors import GatewayError
from areal_gateway.dialects.fields import Field
from areal_gateway.exchange import CallRequest, Exchange, Said
from areal_gateway.records import CallRecord
from areal_gateway.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Served:
    """What a reply's encoding may depend on, besides the calls themselves."""

    tokens: Tokens
    model: str


class Past(Protocol):
    """What a session said before, for a dialect whose requests refer to it. Reading it changes nothing."""

    def conversation(self, exchange_id: str) -> list[dict[str, Any]] | None:
        """All messages of an earlier exchange, its reply last; None where there is no such reply."""
        ...


class StreamEncoder(Protocol):
    """One stream of server-sent events to one client."""

    def said(self, said: Said) -> bytes: ...

    def failed(self, error: GatewayError) -> bytes:
        """The error, as this API tells one in the middle of a stream."""
        ...

    def idle(self) -> bytes:
        """A sign of life while there is nothing to say."""
        ...

    def done(self, records: list[CallRecord]) -> bytes: ...


class Dialect(Protocol):
    """One API. `path` is where it is served, relative to the root; `fields` says what becomes of a request's."""

    name: str
    path: str
    fields: dict[str, Field]

    def read(self, body: Any, past: Past) -> CallRequest:
        """A parsed JSON body -> request. Raises GatewayError (400) with a sentence."""
        ...

    def reply(self, served: Served, request: CallRequest, exchange: Exchange) -> bytes:
        """A finished exchange as one JSON document."""
        ...

    def stream(self, served: Served, request: CallRequest, exchange: Exchange) -> StreamEncoder: ...

    def error(self, error: GatewayError) -> bytes:
        """An error as this API shapes it."""
        ...


class Counter(Protocol):
    """An endpoint that tells how long a prompt would be, and samples nothing."""

    path: str
    fields: dict[str, Field]

    def read(self, body: Any, past: Past) -> CallRequest: ...

    def reply(self, tokens: int) -> bytes: ...

    def error(self, error: GatewayError) -> bytes: ...


def usage_of(records: Iterable[CallRecord]) -> dict[str, int]:
    """Tokens of an exchange; the prompt is counted once for all siblings, as OpenAI does."""
    records = list(records)
    prompt = records[0].prompt_length if records else 0
    output = sum(len(r.output_ids) for r in records)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
