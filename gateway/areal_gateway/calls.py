"""One request of an agent, from its messages to its recorded replies.

Invariant: prepare changes nothing; a call is committed once, in exactly one state, and the client sees the
end of its reply only after that is durable. When the last client leaves, the engine's work is cancelled.

A request runs as an Exchange in a task of its own, and clients subscribe to it: the one that asked, and
those that retry it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from secrets import token_hex
from typing import Any, Protocol

from areal_agent.errors import EngineError, GatewayError
from areal_gateway.ahead import Ahead, count_tokens, prepare_ahead
from areal_gateway.events import EventBus
from areal_gateway.exchange import CallRequest, Exchange, Said, Told
from areal_gateway.fleet.protocol import EngineRefused
from areal_gateway.fleet.types import Chunk, EngineSampling, FleetUnavailable
from areal_gateway.ledger import Ledger, LedgerError
from areal_gateway.metrics import Metrics
from areal_gateway.prepare import Prepared, prepare_all, seed_of
from areal_gateway.records import CallRecord, CallState, Span, floats, ints
from areal_gateway.reply import Pace, ReplyFormat, ReplyStream, read_reply
from areal_gateway.rows import call_rows
from areal_gateway.sessions import Session, check_open
from areal_gateway.tokens import Tokens
from areal_gateway.tree import Attachment
from areal_gateway.turns import turns

log = logging.getLogger(__name__)


class Fleet(Protocol):
    """What the core needs of the engines."""

    @property
    def version(self) -> int: ...
    def generate(
        self, *, session_id: str, prompt_ids: Sequence[int], sampling: EngineSampling
    ) -> AsyncIterator[Chunk]: ...


class Sampled:
    """What one call has of its reply so far."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float | None] = []
        self.top: list[tuple[tuple[int, float], ...]] = []
        self.finish: str | None = None
        self.spans: tuple[Span, ...] = ()

    def add(self, chunk: Chunk) -> None:
        self.ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        if chunk.top is not None:
            self.top += [tuple(t) for t in chunk.top]
        if chunk.finish_reason is not None:
            self.finish = chunk.finish_reason
        if chunk.spans is not None:
            self.spans = tuple((int(a), int(b), int(v)) for a, b, v in chunk.spans)

    def told(self, start: int) -> tuple[Told, ...]:
        """The tokens from `start` on."""
        top = self.top[start:] if self.top else [()] * (len(self.ids) - start)
        columns = zip(self.ids[start:], self.logprobs[start:], top, strict=True)
        return tuple(Told(t, math.nan if p is None else p, top) for t, p, top in columns)

    def fault(self) -> str | None:
        """Why this reply cannot be trained, or None: one finite logprob and one version for every token."""
        n = len(self.ids)
        if len(self.logprobs) != n:
            return f"{n} tokens but {len(self.logprobs)} logprobs"
        if (wrong := _first_without(self.logprobs)) is not None:
            return f"token {wrong} of {n} has logprob {self.logprobs[wrong]}"
        at = 0
        for start, end, version in self.spans:
            if start != at or end <= start or version < 0:
                return f"version spans {list(self.spans)} do not cover {n} tokens in order"
            at = end
        if at != n:
            return f"version spans {list(self.spans)} cover {at} of {n} tokens"
        return None


def _first_without(logprobs: list[float | None]) -> int | None:
    """The first token that has no finite logprob."""
    try:
        if math.isfinite(sum(logprobs)):  # type: ignore[arg-type]
            return None
    except TypeError:  # a None among them
        pass
    return next((i for i, p in enumerate(logprobs) if p is None or not math.isfinite(p)), None)


class Calls:
    """Runs exchanges against the fleet and commits their calls."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        tokens: Tokens,
        ledger: Ledger,
        events: EventBus,
        metrics: Metrics,
        call_timeout_s: float,
    ) -> None:
        self._fleet = fleet
        self._tokens = tokens
        self._ledger = ledger
        self._events = events
        self._metrics = metrics
        self._timeout_s = call_timeout_s
        self._pace = Pace()
        totals, self.tokens_sampled = ledger.call_totals()
        self.totals: dict[str, int] = {s.value: totals.get(s.value, 0) for s in CallState}
        self.running = 0
        self.stopping = False
        """No call is started any more."""

    def find_retry(
        self, session: Session, digest: bytes, *, retry_count: int, retry_key: str | None
    ) -> Exchange | None:
        """The exchange to replay or join, or None when the request has to be served anew: there is no
        evidence that it repeats any, or the one that it repeats failed.

        Evidence is the same Idempotency-Key, or an SDK's word that this is a retry, each with the same body.
        The same prompt alone is none: that is how best-of-n is asked for. Among several candidates a
        retry gets the one that nobody received, nobody listens to, and fewest asked for. If every one is
        somebody's, and one more failed, the retry is of that one, once: siblings stay as many as were asked for.
        """
        repeated = session.exchanges.get(digest, [])
        if retry_key is not None:
            repeated = [e for e in repeated if e.retry_key == retry_key]
        elif retry_count == 0:
            repeated = []
        known = [e for e in repeated if e.replayable]
        found = min(reversed(known), key=lambda e: (e.delivered, e.subscribers > 0, e.claims), default=None)
        failed = next((e for e in repeated if not e.replayable and not e.retried), None)
        if failed is not None and (found is None or found.delivered or found.subscribers):
            failed.retried = True
            return None
        if found is None:
            return None
        self._metrics.retries.labels("replayed" if found.finished else "joined").inc()
        return found

    def restore(self, session: Session) -> None:
        """Exchanges of a session read back from the ledger, so that a retry after a restart is one."""
        by_exchange: dict[str, list[CallRecord]] = {}
        for record in session.history.calls:
            by_exchange.setdefault(record.exchange_id, []).append(record)
        for records in by_exchange.values():
            exchange = Exchange.restored(session, records)
            session.exchanges.setdefault(exchange.digest, []).append(exchange)

    async def count(self, session: Session, request: CallRequest) -> int:
        """Tokens its prompt would have, were it asked now. Raises GatewayError (400)."""
        check_open(session)
        return await count_tokens(self._tokens, session, request)

    async def prepare(self, session: Session, request: CallRequest) -> Ahead:
        """All that can be done before `start`. Raises GatewayError when the request cannot be served at all."""
        check_open(session)
        return await prepare_ahead(self._tokens, session, request)

    def start(
        self, session: Session, request: CallRequest, digest: bytes, retry_key: str | None, ahead: Ahead
    ) -> Exchange:
        """Start what was prepared. Raises GatewayError when it cannot be served (any more)."""
        if self.stopping:
            raise stopping()
        check_open(session)
        prepared = ahead.prepared if ahead.holds(session) else prepare_all(self._tokens, session, request)
        exchange = Exchange(session, request, digest, retry_key)
        exchange.prompt_tokens = sum(len(p.prompt_ids) for p in prepared)
        session.exchanges.setdefault(digest, []).append(exchange)
        session.running.add(exchange)
        exchange.task = asyncio.create_task(
            self._run(exchange, prepared), name=f"exchange {exchange.exchange_id}"
        )
        exchange.task.add_done_callback(lambda task: self._ended(exchange, task))
        return exchange

    async def _run(self, exchange: Exchange, prepared: list[Prepared]) -> None:
        n = exchange.request.n
        siblings: list[tuple[Prepared, int]] = []
        for p in prepared:
            first = exchange.session.tree.ask(p.attachment, n)
            siblings += [(p, first + i) for i in range(n)]
        if len(siblings) == 1:
            await self._call(exchange, prepared[0], 0, siblings[0][1])
            return
        async with asyncio.TaskGroup() as group:
            for index, (p, sibling) in enumerate(siblings):
                group.create_task(self._call(exchange, p, index, sibling))

    def _ended(self, exchange: Exchange, task: asyncio.Task[None]) -> None:
        """However the task ended, its listeners hear of it."""
        error = exchange.error
        if error is None and task.cancelled():
            error = stopping()
        elif error is None and (failure := task.exception()) is not None:
            error = _as_gateway_error(failure)
        exchange.session.running.discard(exchange)
        exchange.task = None  # with it goes all that it worked with
        exchange.end(error)
        if error is not None:
            exchange.session.last_error = str(error)
            level = logging.INFO if error.code in ("client_left", "session_sealed") else logging.WARNING
            log.log(level, "session %s: a request got no reply: %s", exchange.session.id, error)

    async def _call(self, exchange: Exchange, prepared: Prepared, index: int, sibling: int) -> None:
        """One sibling: sample, read, commit. Raises GatewayError after the call was committed as failed."""
        session, request = exchange.session, exchange.request
        parent = prepared.attachment.parent
        same_tools = parent is not None and parent.tools_key == prepared.attachment.tools_key
        call_id = token_hex(16)
        sampling = prepared.sampling
        if (seed := seed_of(session.record.sampling, prepared.prompt_ids, sibling)) is not None:
            sampling = replace(sampling, seed=seed)
        fmt = ReplyFormat(request.tools, request.parse_tools, request.stop, plain=bool(request.prompts))
        stream = ReplyStream(self._tokens, fmt, prepared.prompt_ids, self._pace) if request.stream else None
        sampled, started = Sampled(), time.time()
        state, reason, reply, error = CallState.ABORTED, None, None, None
        self._begin(stream)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._sample(exchange, prepared, sampling, index, sampled, stream)
            await turns().turn()
            reply = read_reply(self._tokens, fmt, prepared.prompt_ids, sampled.ids, call_id)
            reason = sampled.fault()
            state = CallState.TRUNCATED if sampled.finish == "length" else CallState.COMPLETE
            if reason:
                state = CallState.INCOMPLETE
            elif prepared.context_only is not None:
                state, reason = CallState.CONSTRAINED, prepared.context_only
        except TimeoutError:
            reason = f"no whole reply within {self._timeout_s:g} s"
            error = GatewayError(f"{reason}; raise fleet.call_timeout_s", status=504, code="call_timeout")
        except FleetUnavailable as e:
            state, reason = CallState.FAILED, str(e)
            error = GatewayError(f"no engine could serve this call: {e}", status=503, code="no_engine")
        except EngineRefused as e:
            state, reason = CallState.FAILED, str(e)
            error = GatewayError(f"the engine refuses this request: {e}", status=400, code="engine_refused")
        except EngineError as e:
            state, reason = CallState.FAILED, str(e)
            error = GatewayError(f"no engine could serve this call: {e}", status=503, code="engine_error")
        except asyncio.CancelledError:
            reason = str(exchange.error) if exchange.error else "a sibling call failed, or the gateway stops"
            raise
        except Exception as e:
            state, reason = CallState.FAILED, f"{type(e).__name__}: {e}"
            log.exception("session %s: call %s failed inside the gateway", session.id, call_id)
            error = GatewayError(
                "the gateway failed on this call; its log says why", status=500, code="internal"
            )
        finally:
            self._finish(stream, state, sampled, time.time() - started)
            record = CallRecord(
                call_id=call_id,
                session_id=session.id,
                exchange_id=exchange.exchange_id,
                index=index,
                parent_id=parent.record.call_id if parent else None,
                cause=prepared.attachment.cause.value if prepared.attachment.cause else None,
                state=state,
                reason=reason,
                finish_reason=_finish_reason(state, sampled, reply),
                dialect=request.dialect,
                digest=exchange.digest,
                retry_key=exchange.retry_key,
                labels=request.labels,
                messages=prepared.attachment.new_messages,
                tools=parent.record.tools if parent and same_tools else request.tools,
                reply=reply,
                shared=prepared.shared,
                suffix_ids=prepared.prompt_ids[prepared.shared :],
                output_ids=ints(sampled.ids),
                logprobs=floats(sampled.logprobs),
                spans=sampled.spans,
                temperature=sampling.temperature,
                max_tokens=sampling.max_tokens,
                seed=sampling.seed,
                started_at=started,
                ended_at=time.time(),
            )
            written = self._commit(session, record, prepared.attachment, tools_written=same_tools)
        if error is not None:
            raise error
        before = time.perf_counter()
        try:
            await written
        except LedgerError as e:
            session.withdraw(record)
            raise GatewayError(
                f"the reply could not be recorded: {e}", status=500, code="ledger_error"
            ) from e
        self._metrics.commit_seconds.observe(time.perf_counter() - before)
        if request.top_logprobs:
            exchange.tops[index] = sampled.top
        exchange.records.append(record)
        if stream is not None and reply is not None:
            try:
                for delta in stream.finish(reply):
                    exchange.say(Said(index, delta))
            except ValueError as e:
                log.error("session %s: call %s: %s", session.id, call_id, e)
                raise GatewayError(
                    f"the reply could not be streamed: {e}", status=500, code="stream_error"
                ) from e
            rest = sampled.told(stream.told) if request.tells else ()
            exchange.say(Said(index, record=record, logprobs=rest))

    async def _sample(
        self,
        exchange: Exchange,
        prepared: Prepared,
        sampling: EngineSampling,
        index: int,
        sampled: Sampled,
        stream: ReplyStream | None,
    ) -> None:
        """Collect the engine's chunks. Raises EngineError when it stops before the reply's end."""
        chunks = self._fleet.generate(
            session_id=exchange.session.id, prompt_ids=prepared.prompt_ids, sampling=sampling
        )
        async with aclosing(chunks):  # type: ignore[type-var]  # closing it is what aborts the engine's work
            async for chunk in chunks:
                sampled.add(chunk)
                if stream is not None and chunk.finish_reason is None:
                    deltas = stream.feed(sampled.ids)
                    for i, delta in enumerate(deltas):
                        fresh: tuple[Told, ...] = ()
                        if i == 0 and exchange.request.tells:
                            fresh, stream.told = sampled.told(stream.told), len(sampled.ids)
                        exchange.say(Said(index, delta, logprobs=fresh))
        if sampled.finish is None:
            raise EngineError(f"the engine's stream ended after {len(sampled.ids)} tokens, without an end")
        if sampled.finish not in ("stop", "length"):
            raise EngineError(
                f"the engine ended the reply after {len(sampled.ids)} tokens by {sampled.finish!r}"
            )

    def _begin(self, stream: ReplyStream | None) -> None:
        self.running += 1
        self._metrics.running.set(self.running)
        self._pace.streams += stream is not None

    def _finish(self, stream: ReplyStream | None, state: CallState, sampled: Sampled, seconds: float) -> None:
        self.running -= 1
        self._metrics.running.set(self.running)
        self._pace.streams -= stream is not None
        self.totals[state.value] += 1
        self.tokens_sampled += len(sampled.ids)
        self._metrics.calls.labels(state.value).inc()
        self._metrics.tokens.inc(len(sampled.ids))
        self._metrics.call_seconds.observe(seconds)

    def _commit(
        self, session: Session, record: CallRecord, attachment: Attachment, *, tools_written: bool
    ) -> asyncio.Future[None]:
        """Into the ledger's queue, the session's history and its tree, all in this order and at once."""
        written = self._ledger.append(*call_rows(record, tools_written=tools_written))
        session.add(record)
        session.tree.add(record, attachment)
        if record.cause is not None:
            self._metrics.branches.labels(record.cause).inc()
        if record.state is CallState.INCOMPLETE:
            log.warning("session %s: call %s is incomplete: %s", session.id, record.call_id, record.reason)
        elif record.state is CallState.FAILED:
            log.warning("session %s: call %s failed: %s", session.id, record.call_id, record.reason)
        self._events.publish(
            "call",
            session_id=session.id,
            call_id=record.call_id,
            parent_id=record.parent_id,
            cause=record.cause,
            state=record.state.value,
            reason=record.reason,
            prompt_tokens=record.prompt_length,
            output_tokens=len(record.output_ids),
            versions=sorted(record.versions),
            labels=record.labels,
        )
        return written


def stopping() -> GatewayError:
    return GatewayError("the gateway is stopping; try again", status=503, code="stopping")


def _as_gateway_error(failure: BaseException) -> GatewayError:
    """Of several siblings' failures the first one of ours; anything else is a fault in the gateway."""
    if isinstance(failure, GatewayError):
        return failure
    if isinstance(failure, BaseExceptionGroup):
        for inner in failure.exceptions:
            if isinstance(inner, GatewayError):
                return inner
    log.error("an exchange failed", exc_info=failure)
    return GatewayError("the gateway failed on this request; its log says why", status=500, code="internal")


def _finish_reason(state: CallState, sampled: Sampled, reply: dict[str, Any] | None) -> str | None:
    """In the words of chat completions."""
    if reply is None:
        return None
    if sampled.finish == "length":
        return "length"
    return "tool_calls" if reply.get("tool_calls") else "stop"
