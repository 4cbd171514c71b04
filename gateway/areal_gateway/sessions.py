"""Sessions: opened, observed, rewarded, sealed.

Invariant: once a session is sealed nothing about it changes: its calls in flight are aborted first, later
calls and rewards are refused, and its fold is the same for ever. Only open sessions are kept in memory
with their calls; of sealed ones the ledger has everything, and memory is let go.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from areal_agent.errors import GatewayError
from areal_gateway import auth
from areal_gateway.credit import Credit
from areal_gateway.events import EventBus
from areal_gateway.ledger import Ledger, LedgerError
from areal_gateway.metrics import Metrics
from areal_gateway.records import (
    CallRecord,
    Outcome,
    RewardRecord,
    Sampling,
    SealRecord,
    SessionHistory,
    SessionRecord,
)
from areal_gateway.rows import delivery_row, reward_row, seal_row, session_row
from areal_gateway.trajectories import fold, trainable_calls
from areal_gateway.tree import CallTree, conversation

if TYPE_CHECKING:
    from areal_gateway.exchange import Exchange

log = logging.getLogger(__name__)

SEAL_WAIT_S = 10.0
"""Longest a seal waits for the calls it aborted to be written down."""


class Session:
    """One open session: its history so far, its call tree, and its calls in flight."""

    def __init__(self, record: SessionRecord, history: SessionHistory | None = None) -> None:
        self.record = record
        self.history = history or SessionHistory(record)
        self.tree = CallTree()
        for call in self.history.calls:
            self.tree.restore(call)
        self.running: set[Exchange] = set()
        self.exchanges: dict[bytes, list[Exchange]] = {}
        """Exchanges by digest of the request, in order: where retries find what they repeat."""
        self.sealing: asyncio.Task[SealRecord] | None = None
        self.active_at = max([record.opened_at, *(c.ended_at for c in self.history.calls)])
        """When a call last ended, or the session was opened (seconds since 1970)."""
        self.last_error: str | None = None

    @property
    def id(self) -> str:
        return self.record.session_id

    @property
    def deadline(self) -> float:
        return self.record.opened_at + self.record.deadline_s

    def add(self, call: CallRecord) -> None:
        self.history.calls.append(call)
        self.active_at = max(self.active_at, call.ended_at)

    def withdraw(self, call: CallRecord) -> None:
        """The ledger could not take this call: nothing may continue it, and no fold may count it."""
        self.history.calls.remove(call)
        self.tree.remove(call.call_id)

    def conversation(self, exchange_id: str) -> list[dict[str, Any]] | None:
        """All messages of an earlier exchange, its reply last; None where this session has no such reply."""
        for call in reversed(self.history.calls):
            if call.exchange_id == exchange_id and (node := self.tree.node(call.call_id)) is not None:
                return conversation(node)
        return None


def summary(history: SessionHistory, credit: Credit) -> dict[str, Any]:
    """What a seal answers, and the head of an inspection."""
    state, value = credit.of_session(history)
    seal = history.seal
    trained = seal.trained_tokens if seal else fold(history, value, credit).trained_tokens
    return {
        "session_id": history.session.session_id,
        "state": "sealed" if seal else "open",
        "outcome": seal.outcome.value if seal else None,
        "error": seal.error if seal else None,
        "calls": dict(Counter(c.state.value for c in history.calls)),
        "reward_state": state,
        "reward": value,
        "trained_tokens": trained,
    }


class Sessions:
    """Every open session, and the way back to sealed ones."""

    def __init__(
        self,
        ledger: Ledger,
        events: EventBus,
        metrics: Metrics,
        *,
        grace_s: float,
        idle_s: Callable[[SessionRecord], float | None],
        seed: int | None,
        credit: Credit,
        on_open: Callable[[SessionRecord], None],
        on_seal: Callable[[SessionRecord, SealRecord], None],
        on_withdraw: Callable[[SessionRecord], None],
    ) -> None:
        self._ledger = ledger
        self._events = events
        self._metrics = metrics
        self._grace_s = grace_s
        self._idle_s = idle_s
        self._seed = seed
        self.credit = credit
        self._opened_per_task: Counter[tuple[str, str]] = Counter()
        """Sessions by (purpose, task): which repetition a session is, for its seed."""
        self._on_open = on_open
        self._on_seal = on_seal
        self._on_withdraw = on_withdraw
        self._open: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}
        self._admitted = 0
        self.sealed_count = 0

    def restore(self) -> None:
        """Bring back what an earlier process wrote. Call once, before serving."""
        for record, seal in self._ledger.sessions():
            self._admitted = record.admitted + 1
            self._count(record)
            self._on_open(record)
            if seal is not None:
                self.sealed_count += 1
                self._on_seal(record, seal)
                continue
            history = self._ledger.histories([record.session_id])[record.session_id]
            self._remember(Session(record, history))
        if self._admitted:
            log.info("ledger has %d sessions, %d of them open", self._admitted, len(self._open))

    def _remember(self, session: Session) -> None:
        self._open[session.id] = session
        self._by_key[session.record.key_hash] = session
        self._metrics.sessions.set(len(self._open))

    def _count(self, record: SessionRecord) -> None:
        """Only where seeds depend on it: a service's sessions are each a task of their own, without end."""
        if self._seed is not None:
            self._opened_per_task[record.purpose, record.task_id] += 1

    def _forget(self, session: Session) -> None:
        del self._open[session.id]
        del self._by_key[session.record.key_hash]
        session.exchanges.clear()  # each refers to its session: the collector would have to find this circle
        self._metrics.sessions.set(len(self._open))

    @property
    def open_count(self) -> int:
        return len(self._open)

    def running(self) -> list[Session]:
        return list(self._open.values())

    async def open(
        self,
        *,
        task_id: str,
        group_id: str | None,
        group_size: int,
        purpose: str,
        sampling: Sampling,
        deadline_s: float,
        labels: dict[str, str],
        version: int,
    ) -> tuple[Session, str]:
        """A new session and its key, which exists nowhere else from now on.

        Without a seed of its own it gets one from the run's, if that has one.
        """
        key = auth.new_session_key()
        session_id = f"ses_{uuid4().hex}"
        if sampling.seed is None and self._seed is not None:
            repetition = self._opened_per_task[purpose, task_id]
            sampling = replace(sampling, seed=repetition_seed(self._seed, purpose, task_id, repetition))
        record = SessionRecord(
            session_id=session_id,
            key_hash=auth.hash_key(key),
            task_id=task_id,
            group_id=group_id or f"grp_{session_id[4:]}",
            group_size=group_size,
            purpose=purpose,
            sampling=sampling,
            deadline_s=deadline_s,
            labels=labels,
            opened_version=version,
            opened_at=time.time(),
            admitted=self._admitted,
        )
        self._on_open(record)  # refuses a group that is full or of another size
        self._admitted += 1
        self._count(record)
        session = Session(record)
        self._remember(session)
        try:
            await self._ledger.append(session_row(record))
        except LedgerError:  # nobody has its key; left behind it would keep its group open until its deadline
            self._forget(session)
            self._opened_per_task.subtract([(purpose, task_id)] if self._seed is not None else [])
            self._on_withdraw(record)
            raise
        log.info("session %s opened: task %s, group %s, %s", session_id, task_id, record.group_id, purpose)
        self._events.publish(
            "session_opened", session_id=session_id, task_id=task_id, group_id=record.group_id
        )
        return session, key

    async def by_key(self, key: str) -> Session:
        """The open session of an agent's key. Raises GatewayError: 401 unknown, 409 sealed or too late."""
        if (session := self.open_by_key(key)) is not None:
            return session
        session_id = await asyncio.to_thread(self._ledger.session_id_of_key, auth.hash_key(key))
        if session_id is None:
            raise GatewayError(
                "this key belongs to no session; use the api_key that opening a session returned",
                status=401,
                code="unauthorized",
            )
        raise sealed_error(session_id)

    def open_by_key(self, key: str) -> Session | None:
        """None: of no open session. Raises GatewayError (409): it is too late."""
        session = self._by_key.get(auth.hash_key(key))
        if session is not None:
            check_open(session)
        return session

    def get_open(self, session_id: str) -> Session | None:
        return self._open.get(session_id)

    async def history(self, session_id: str) -> SessionHistory:
        """Of an open or a sealed session. Raises GatewayError (404)."""
        if session := self._open.get(session_id):
            return session.history
        found = await asyncio.to_thread(self._ledger.histories, [session_id])
        if session_id not in found:
            raise GatewayError(f"no session {session_id!r}", status=404, code="unknown_session")
        return found[session_id]

    async def reward(
        self,
        session_id: str,
        *,
        key: str,
        name: str,
        value: float | None,
        call_id: str | None = None,
        labels: dict[str, str] | None = None,
    ) -> SessionHistory:
        """Add a reward of the session, of one of its calls, or of its calls with these labels.

        The same key, name, value and subject again is no new fact, also after the seal.
        Raises GatewayError: 409 when the session is sealed, 404 when it or the call is unknown, 400 for two subjects.
        """
        session = self._open.get(session_id)
        history = session.history if session else await self.history(session_id)
        record = RewardRecord(session_id, key, name, value, call_id, time.time(), labels or {})
        if call_id is not None and record.labels:
            raise GatewayError(
                "a reward is of one call or of calls with labels, not both",
                status=400,
                code="invalid_request",
            )
        if call_id is not None and all(c.call_id != call_id for c in history.calls):
            raise GatewayError(
                f"session {session_id} has no call {call_id!r}", status=404, code="unknown_call"
            )
        subject = (key, name, call_id, record.labels)
        known = [r for r in history.rewards if (r.key, r.name, r.call_id, r.labels) == subject]
        if known and known[-1].value == value:
            await self._ledger.append()  # a first one still on its way to the disk is waited for
            return history
        if session is None or session.sealing is not None:
            raise sealed_error(session_id)
        history.rewards.append(record)
        try:
            await self._ledger.append(reward_row(record))
        except LedgerError:
            history.rewards.remove(record)  # it is not in the ledger, so a repetition has to write it
            raise
        self._events.publish("reward", session_id=session_id, name=name, value=value)
        return history

    def delivered(self, session: Session, call_ids: list[str]) -> None:
        """The client got the last byte of these calls. After the seal it changes nothing, so it is no news."""
        fresh = [c for c in call_ids if c not in session.history.delivered]
        if not fresh or session.sealing is not None:
            return
        session.history.delivered.update(fresh)
        now = time.time()
        self._ledger.note(*(delivery_row(c, now) for c in fresh))

    async def seal(self, session_id: str, outcome: Outcome, error: str | None) -> SessionHistory:
        """End a session: abort its calls, fold it, write that down. A second seal changes nothing."""
        session = self._open.get(session_id)
        if session is None:
            return await self.history(session_id)
        if session.sealing is None:
            session.sealing = asyncio.create_task(
                self._seal(session, outcome, error), name=f"seal {session_id}"
            )
        await asyncio.shield(session.sealing)
        return await self.history(session_id)

    async def _seal(self, session: Session, outcome: Outcome, error: str | None) -> SealRecord:
        tasks = [e.task for e in session.running if e.task is not None]
        for exchange in list(session.running):
            exchange.abort(sealed_error(session.id))
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=SEAL_WAIT_S)
            if late:
                log.error("session %s: %d calls did not stop within %g s", session.id, len(late), SEAL_WAIT_S)
        history = session.history
        _, value = self.credit.of_session(history)
        trajectory = fold(history, value, self.credit)
        trained = trainable_calls(history, self.credit)
        seal = SealRecord(
            session_id=session.id,
            outcome=outcome,
            error=error,
            reward=value,
            trained_tokens=trajectory.trained_tokens,
            oldest_version=min(
                (v for s in trajectory.sequences if (v := s.oldest_version()) is not None), default=None
            ),
            multi_version_calls=sum(len(c.versions) > 1 for c in history.calls if c.call_id in trained),
            at=time.time(),
        )
        try:
            await self._ledger.append(seal_row(seal))
        except BaseException:
            session.sealing = None  # it is not sealed; whoever asked hears why and may ask again
            raise
        self._forget(session)
        self.sealed_count += 1
        self._on_seal(session.record, seal)
        counts = dict(Counter(c.state.value for c in history.calls))
        if not counts and session.record.purpose != "rollout":
            log.warning(
                "session %s sealed without a single call: did its agent use this gateway's base_url and its key? "
                "last error: %s",
                session.id,
                session.last_error or "none",
            )
        log.info(
            "session %s sealed: %s, calls %s, reward %s, %d tokens trained%s",
            session.id,
            outcome.value,
            counts,
            "missing" if value is None else value,
            seal.trained_tokens,
            f", error: {error}" if error else "",
        )
        self._events.publish(
            "session_sealed",
            session_id=session.id,
            group_id=session.record.group_id,
            outcome=outcome.value,
            reward=value,
            trained_tokens=seal.trained_tokens,
        )
        return seal

    async def enforce_deadlines(self) -> None:
        """Abort what runs past a session's deadline; seal it when nobody did within the grace for rewards."""
        now = time.time()
        for session in list(self._open.values()):
            if session.sealing is not None:
                continue
            if now < session.deadline:
                await self._seal_if_idle(session, now)
                continue
            for exchange in list(session.running):
                exchange.abort(deadline_error(session))
            if now >= session.deadline + self._grace_s:
                log.warning(
                    "session %s: nobody sealed it, its deadline was %.0f s ago", session.id, self._grace_s
                )
                await self.seal(session.id, Outcome.TIMEOUT, "deadline passed, never sealed")

    async def _seal_if_idle(self, session: Session, now: float) -> None:
        idle_s = self._idle_s(session.record)
        if idle_s is None or session.running or now < session.active_at + idle_s:
            return
        log.info("session %s: no call for %.0f s, sealed", session.id, now - session.active_at)
        await self.seal(session.id, Outcome.TIMEOUT, f"no call for {idle_s:g} s")


def repetition_seed(run_seed: int, purpose: str, task_id: str, repetition: int) -> int:
    """The seed of a task's n-th session: the same in a repeated run, another one for each of a group."""
    digest = hashlib.blake2b(f"{run_seed}|{purpose}|{repetition}|{task_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFF_FFFF


def check_open(session: Session) -> None:
    """Raises GatewayError (409) when the session takes no more calls."""
    if session.sealing is not None:
        raise sealed_error(session.id)
    if time.time() >= session.deadline:
        raise deadline_error(session)


def sealed_error(session_id: str) -> GatewayError:
    return GatewayError(
        f"session {session_id} is sealed; open a new one for further calls", status=409, code="session_sealed"
    )


def deadline_error(session: Session) -> GatewayError:
    return GatewayError(
        f"session {session.id} is past its deadline of {session.record.deadline_s:g} s",
        status=409,
        code="session_deadline",
    )
