"""An exchange: one request of an agent and its sibling calls, while they run and after.

Invariant: whoever subscribes gets everything from the beginning, whenever it comes; when the last one
leaves an unfinished exchange, it is aborted. An exchange only listens and tells: `calls` runs it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NamedTuple

from areal_agent.errors import GatewayError
from areal_gateway.constraint import Constraint
from areal_gateway.records import REPLIED, CallRecord
from areal_gateway.reply import Delta, deltas_of
from areal_gateway.wishes import Wishes

if TYPE_CHECKING:
    from areal_gateway.sessions import Session


class ContextLengthError(GatewayError):
    """No room for a reply. Each dialect words it as its own clients expect, so that they know to compact.

    Attributes:
        prompt_tokens: what the request came to.
        context: most tokens of prompt and reply together.
    """

    def __init__(self, prompt_tokens: int, context: int) -> None:
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages.",
            status=400,
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.context = context


def exchange_id_of(response_id: str) -> str:
    """The exchange behind a response id such as `chatcmpl-ID`, `resp_ID` or `msg_ID`."""
    return response_id.replace("-", "_").rpartition("_")[2]


Prompt = str | tuple[int, ...]
"""A raw prompt: text that is tokenised as it stands, or token ids."""

RETRY_GRACE_S = 1.5
"""How long a call outlives a client whose SDK retries (`x-stainless-retry-count`). Those back off 0.5 s, then
1 s; without the grace a time-out would throw the reply away just before it is asked for again."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A request as a dialect read it; everything past this point knows no dialect.

    `messages` and `tools` are in chat-completions shape, ready for a renderer. `parse_tools` False: text
    that looks like a tool call stays text. `max_tokens` None: as far as the context goes. `after`: the exchange
    that the client says it continues, which decides among calls that said the same. `prompts`: instead of
    messages, raw prompts, each of which makes `n` calls; their replies are plain text. `top_logprobs`: how many
    of the likeliest tokens to tell at each position. `token_ids`: the ids are told. `constraint`: what a reply may be, None where it is free.
    `wishes`: the sampling it may choose, None where the run pins it.
    `notes` are the dialect's own, for wording its reply; the core never reads them.
    """

    dialect: str
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    parse_tools: bool = False
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    token_ids: bool = False
    constraint: Constraint | None = None
    wishes: Wishes | None = None
    ignored: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    after: str | None = None
    prompts: tuple[Prompt, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def tells(self) -> bool:
        """Whether the client is told of each token."""
        return self.logprobs or self.token_ids

    @property
    def choices(self) -> int:
        """Calls that it makes."""
        return self.n * max(1, len(self.prompts))


@cache
def forgotten(dialect: str) -> CallRequest:
    """What is kept of a request that has ended: nothing."""
    return CallRequest(dialect, "", [])


class Told(NamedTuple):
    """One sampled token as a client is told of it.

    `logprob` is NaN where the engine gave none; `top` are the likeliest tokens there, (token id, logprob), the
    likeliest first, empty where they were not asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Said:
    """Something for the client: a delta of choice `index`, or its end (`record` given).

    `logprobs` [k]: of the tokens sampled since the choice last said something, where they were asked for.
    """

    index: int
    delta: Delta | None = None
    record: CallRecord | None = None
    logprobs: tuple[Told, ...] = ()


class Exchange:
    """A running or finished request. Created by Calls.start."""

    def __init__(self, session: Session, request: CallRequest, digest: bytes, retry_key: str | None) -> None:
        self.exchange_id = token_hex(16)
        self.session = session
        self.request = request
        self.digest = digest
        self.retry_key = retry_key
        self.prompt_tokens = 0
        self.choices = request.choices
        self.created = time.time()
        self.records: list[CallRecord] = []
        self.tops: dict[int, list[tuple[tuple[int, float], ...]]] = {}
        """By choice, the likeliest tokens at each position, where they were asked for. The ledger does not
        keep them: a reply that is repeated after a restart is told without."""
        self.error: GatewayError | None = None
        self.finished = False
        self.task: asyncio.Task[None] | None = None
        self.subscribers = 0
        self.claims = 0
        """Clients that ever asked for it; a retry prefers the exchange that fewest have claimed."""
        self.retried = False
        """Whether it failed and a client came to ask again, which made another exchange."""
        self._said: list[Said] = []
        self._waiting: list[asyncio.Future[bool]] = []

    @classmethod
    def restored(cls, session: Session, records: list[CallRecord]) -> Exchange:
        """A finished exchange read back from the ledger, to be replayed if all its calls were replied."""
        head = records[0]
        self = cls(session, forgotten(head.dialect), head.digest, head.retry_key)
        self.choices = len(records)
        self.exchange_id, self.created = head.exchange_id, head.started_at
        self.records = sorted((r for r in records if r.state in REPLIED), key=lambda r: r.index)
        self.prompt_tokens = head.prompt_length
        self.finished, self.claims = True, 1
        return self

    @property
    def delivered(self) -> bool:
        return bool(self.records) and all(r.call_id in self.session.history.delivered for r in self.records)

    @property
    def replayable(self) -> bool:
        """In progress, or ended with all its replies."""
        return not self.finished or (self.error is None and len(self.records) == self.choices)

    def say(self, said: Said) -> None:
        self._said.append(said)
        self._wake()

    def end(self, error: GatewayError | None) -> None:
        if error is not None:  # it is kept, and with where it came from all that was worked with there
            error.__traceback__ = error.__cause__ = error.__context__ = None
        self.error = error
        self.finished = True
        self.records.sort(key=lambda r: r.index)
        self.request = forgotten(self.request.dialect)  # a retry brings the rest again
        self._wake()
        self.forget()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            _settle(changed, True)

    async def _change(self, within_s: float | None = None) -> bool:
        """Wait until something is said, or the end; False when nothing was `within_s`."""
        loop = asyncio.get_running_loop()
        changed: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(changed)
        if within_s is None:
            return await changed
        late = loop.call_later(within_s, _settle, changed, False)  # a fifth of what asyncio.timeout costs
        try:
            return await changed
        finally:
            late.cancel()

    def abort(self, error: GatewayError) -> None:
        """Stop the engine's work; its calls become `aborted` and whoever still listens gets `error`."""
        if self.task is not None and not self.finished and self.error is None:
            self.error = error
            self.task.cancel()

    @contextmanager
    def subscribed(self, *, patient: bool) -> Iterator[None]:
        """While inside, somebody listens. The last one to leave an unfinished exchange aborts it, after a
        grace when their client is known to retry (`patient`)."""
        self.subscribers += 1
        self.claims += 1
        try:
            yield
        finally:
            self.subscribers -= 1
            if not self.subscribers and not self.finished:
                if patient:
                    asyncio.get_running_loop().call_later(RETRY_GRACE_S, self._abort_if_alone)
                else:
                    self._abort_if_alone()
            self.forget()

    def _abort_if_alone(self) -> None:
        if not self.subscribers:
            self.abort(GatewayError("the client left", status=499, code="client_left"))

    async def wait(self) -> list[CallRecord]:
        """All replies. Raises GatewayError."""
        while not self.finished:
            await self._change()
        if self.error is not None:
            raise self.error
        return self.records

    async def listen(self, idle_s: float) -> AsyncIterator[list[Said]]:
        """Everything from the beginning, what is there at once in one list, which is empty when nothing came for
        `idle_s`. Once the exchange has finished there is one more list at most. Raises GatewayError."""
        if self.finished and self.error is None and not self._said:
            yield [said for record in self.records for said in self._again(record)]
            return
        at = 0
        while True:
            if at < len(self._said):
                fresh = self._said[at:]
                at += len(fresh)
                yield fresh
                continue  # while it was told, more may have come
            if self.finished:
                break
            if not await self._change(idle_s):
                yield []
        if self.error is not None:
            raise self.error

    def _again(self, record: CallRecord) -> Iterator[Said]:
        for delta in deltas_of(record.reply or {}):
            yield Said(record.index, delta)
        yield Said(record.index, record=record, logprobs=tuple(self.told(record)))

    def told(self, record: CallRecord) -> list[Told]:
        """All tokens of one of its replies."""
        tops = self.tops.get(record.index) or [()] * len(record.output_ids)
        return [Told(*t) for t in zip(record.output_ids, record.logprobs, tops, strict=True)]

    def forget(self) -> None:
        """Drop what was said once all was: a later replay is made from the records."""
        if self.finished and not self.subscribers:
            self._said = []


def _settle(changed: asyncio.Future[bool], heard: bool) -> None:
    if not changed.done():  # else its waiter was cancelled, or woken already
        changed.set_result(heard)
