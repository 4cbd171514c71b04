"""Groups of sessions, and their leases to the trainer.

Invariant: while a trainer asks for at most η versions of staleness, no token it is given was sampled more
than η versions before the version it is given at. Nothing is dropped to achieve this: a lease waits for
the groups that would otherwise exceed η at the next version, and takes them (oldest first).

A group is *open* until all its sessions are sealed, then *ready*, or *void* when no session has both a
reward and something to train. A lease makes it *leased*, an ack *consumed*; a nack or the lease's end
makes it ready again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from uuid import uuid4

from areal_agent.errors import GatewayError
from areal_agent.trajectory import Batch
from areal_gateway.credit import Credit
from areal_gateway.events import EventBus
from areal_gateway.ledger import Ledger
from areal_gateway.metrics import Metrics
from areal_gateway.records import LeaseEnd, LeaseRecord, SealRecord, SessionRecord
from areal_gateway.rows import lease_end_row, lease_rows
from areal_gateway.trajectories import fold

log = logging.getLogger(__name__)

Version = Callable[[], int]
"""Reads the fleet's committed version."""

POLL_S = 0.25
"""A waiting lease looks again this often, besides being woken: versions change without telling us."""
SAY_S = 30.0
"""A lease that waits this long says whom it waits for."""


@dataclass(slots=True)
class Group:
    """The sessions of one task that are compared. `opened_version` is that of its earliest session."""

    group_id: str
    size: int
    admitted: int
    opened_version: int
    session_ids: list[str] = field(default_factory=list)
    seals: dict[str, SealRecord] = field(default_factory=dict)
    lease_id: str | None = None

    @property
    def closed(self) -> bool:
        return len(self.seals) == self.size

    @property
    def void(self) -> bool:
        return self.closed and not any(s.reward is not None and s.trained_tokens for s in self.seals.values())

    @property
    def ready(self) -> bool:
        return self.closed and self.lease_id is None

    @property
    def oldest_version(self) -> int:
        """Of its trained tokens."""
        found = [s.oldest_version for s in self.seals.values() if s.oldest_version is not None]
        return min(found, default=self.opened_version)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a lease may take now; `waiting_for` says, in words, why it may not."""

    groups: tuple[Group, ...] = ()
    waiting_for: str = ""


def choose(groups: Seq[Group], *, want: int, max_staleness: int | None, version: int) -> Choice:
    """The lease rule, on groups that are neither void nor consumed.

    A group opened at version u must be trained at version u + η at the latest (η = max_staleness), and one
    batch is trained per version. So of the R(u) groups opened at u or before, this batch, at version v, has
    to take at least R(u) - (u + η - v) · want, or the batches up to u + η cannot take them all. For u = v - η
    these are all of them. If too few of them are ready, the batch waits: younger groups that are ready may
    not overtake them any more. It is earliest-deadline-first scheduling.

    While the controller admits at most (η + v + 1) · want groups up to version v, `want` groups are always
    enough; where it admitted more, a batch is larger rather than staler.
    """
    free = sorted((g for g in groups if g.lease_id is None), key=lambda g: (g.opened_version, g.admitted))
    ready = [g for g in free if g.ready]
    needs = {} if max_staleness is None else _needs(free, want, max_staleness, version)
    size = max([want, *needs.values()])
    chosen = ready[:size]
    for opened, need in needs.items():
        taken = sum(g.opened_version <= opened for g in chosen)
        if taken < need:
            late = [g for g in free if g.opened_version <= opened and not g.ready]
            return Choice(
                waiting_for=f"{need - taken} of {len(late)} groups that are due, first {describe(late[0])}"
            )
    if len(chosen) < size:
        pending = next((g for g in free if not g.ready), None)
        first = f"; oldest open: {describe(pending)}" if pending else ""
        return Choice(waiting_for=f"{size - len(chosen)} more groups of {size}{first}")
    return Choice(tuple(sorted(chosen, key=lambda g: g.admitted)))


def _needs(free: Seq[Group], want: int, max_staleness: int, version: int) -> dict[int, int]:
    """u -> how many of the groups opened at u or before this batch must take; `free` is sorted by u."""
    needs = {}
    for count, group in enumerate(free, start=1):  # the last of each u counts, and overwrites
        slack = max(0, group.opened_version + max_staleness - version)
        needs[group.opened_version] = max(0, count - slack * want)
    return needs


def describe(group: Group) -> str:
    open_ids = [s for s in group.session_ids if s not in group.seals]
    missing = group.size - len(group.session_ids)
    return (
        f"group {group.group_id} of version {group.opened_version} ({len(group.seals)} of {group.size} sealed"
        + (f", {missing} never opened" if missing else "")
        + (f", open: {', '.join(open_ids[:3])}" if open_ids else "")
        + ")"
    )


class Leases:
    """Who trains what. All methods run on the event loop."""

    def __init__(
        self, ledger: Ledger, events: EventBus, metrics: Metrics, credit: Credit | None = None
    ) -> None:
        self._credit = credit or Credit()
        self._ledger = ledger
        self._events = events
        self._metrics = metrics
        self._groups: dict[str, Group] = {}
        self._leases: dict[str, LeaseRecord] = {}
        self._ended: dict[str, LeaseEnd] = {}
        self._past: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._starving: float | None = None
        """When to say next whom the trainer waits for, over its many short polls; None: it does not wait."""
        self.multi_version_calls = 0
        """Distinct acked calls that were sampled under more than one version."""

    # -- what the sessions tell -------------------------------------------------------------------

    def opened(self, session: SessionRecord) -> None:
        """Raises GatewayError (409) when the session does not fit its group."""
        if session.purpose != "train":
            return
        group = self._groups.get(session.group_id)
        if group is None:
            group = self._groups[session.group_id] = Group(
                session.group_id, session.group_size, session.admitted, session.opened_version
            )
        if group.size != session.group_size or len(group.session_ids) >= group.size:
            raise GatewayError(
                f"group {group.group_id} has {len(group.session_ids)} of {group.size} sessions; another one of "
                f"a group of {session.group_size} does not fit",
                status=409,
                code="group_full",
            )
        group.session_ids.append(session.session_id)
        group.opened_version = min(group.opened_version, session.opened_version)

    def withdrawn(self, session: SessionRecord) -> None:
        """The ledger could not take the session that was just opened: its place is free again."""
        if (group := self._groups.get(session.group_id)) is None or session.purpose != "train":
            return
        group.session_ids.remove(session.session_id)
        if not group.session_ids:
            del self._groups[group.group_id]

    def sealed(self, session: SessionRecord, seal: SealRecord) -> None:
        group = self._groups.get(session.group_id)
        if session.purpose != "train" or group is None:
            return
        group.seals[session.session_id] = seal
        if group.void:
            self._forget(group, "void", "no session has both a reward and tokens to train")
        self._changed.set()

    def _forget(self, group: Group, state: str, why: str = "") -> None:
        del self._groups[group.group_id]
        self._past[state] += 1
        self._events.publish(f"group_{state}", group_id=group.group_id)
        if why:
            log.warning("group %s is %s: %s", group.group_id, state, why)

    def restore(self) -> None:
        """After the sessions were restored: leases and acks of an earlier process."""
        for lease, end in self._ledger.leases():
            if end is not None:
                self._ended[lease.lease_id] = end
            else:
                self._leases[lease.lease_id] = lease
            for group_id in lease.group_ids:
                group = self._groups.get(group_id)
                if group is None:
                    continue
                if end is LeaseEnd.ACK:
                    self._consume(group)
                elif end is None:
                    group.lease_id = lease.lease_id

    # -- what the trainer asks ---------------------------------------------------------------------

    async def lease(
        self, *, want: int, max_staleness: int | None, wait_s: float, lease_s: float, version: Version
    ) -> Batch | None:
        """A batch of `want` groups, or None when there was none within `wait_s`."""
        end = time.monotonic() + wait_s
        while True:
            self.expire()
            now = version()
            self._void_stale(max_staleness, now)
            choice = choose(list(self._groups.values()), want=want, max_staleness=max_staleness, version=now)
            if choice.groups:
                self._starving = None
                return await self._grant(choice.groups, now, lease_s)
            self._say_whom(choice, now)
            left = end - time.monotonic()
            if left <= 0:
                return None
            self._changed.clear()
            try:
                async with asyncio.timeout(min(left, POLL_S)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _say_whom(self, choice: Choice, version: int) -> None:
        """Every SAY_S of waiting, who is waited for."""
        now = time.monotonic()
        if self._starving is None:
            self._starving = now + SAY_S
        elif now >= self._starving:
            self._starving = now + SAY_S
            log.info("the trainer waits, at version %d, for %s", version, choice.waiting_for)

    def _void_stale(self, max_staleness: int | None, version: int) -> None:
        """Never happens while admission keeps to its formula; a lease that was lost may cause it."""
        if max_staleness is None:
            return
        for group in [
            g for g in self._groups.values() if g.ready and version - g.oldest_version > max_staleness
        ]:
            self._forget(
                group,
                "void",
                f"its oldest token is {version - group.oldest_version} versions old, allowed are {max_staleness}",
            )

    async def _grant(self, groups: tuple[Group, ...], version: int, lease_s: float) -> Batch:
        now = time.time()
        lease = LeaseRecord(
            f"lea_{uuid4().hex}", version, tuple(g.group_id for g in groups), now + lease_s, now
        )
        for group in groups:
            group.lease_id = lease.lease_id
        self._leases[lease.lease_id] = lease
        try:
            await self._ledger.append(*lease_rows(lease))
            ids = [s for g in groups for s in g.session_ids]
            batch = await asyncio.to_thread(self._fold, lease, ids)
        except BaseException:  # the trainer left, or the ledger failed: nobody holds this lease
            self._end(lease.lease_id, LeaseEnd.NACK)
            raise
        self._events.publish("leased", lease_id=lease.lease_id, groups=len(groups), version=version)
        log.info(
            "lease %s: %d groups, %d sequences, version %d, staleness %d",
            lease.lease_id,
            len(groups),
            len(batch.sequences),
            version,
            batch.staleness(),
        )
        return batch

    def _fold(self, lease: LeaseRecord, session_ids: list[str]) -> Batch:
        """In a worker thread: sealed sessions change no more."""
        histories = self._ledger.histories(session_ids)
        sequences = []
        for session_id in session_ids:
            history = histories[session_id]
            reward = self._credit.of_session(history)[1]
            sequences.extend(fold(history, reward, self._credit).sequences)
        return Batch(lease.lease_id, lease.version, tuple(sequences))

    async def ack(self, lease_id: str) -> None:
        """The batch was trained. Raises GatewayError: 404 unknown, 409 when the lease ended otherwise."""
        self.expire()
        end = self._ended.get(lease_id)
        if end is LeaseEnd.ACK:  # a first ack may have failed for want of room: write it now, or wait for it
            await self._ledger.append(lease_end_row(lease_id, end, time.time()))
            return
        if end is not None or lease_id not in self._leases:
            raise _ended_error(lease_id, end)
        await self._end(lease_id, LeaseEnd.ACK)

    async def nack(self, lease_id: str) -> None:
        """Give the batch back. Ending an ended lease otherwise than by ack changes nothing."""
        end = self._ended.get(lease_id)
        if end in (LeaseEnd.NACK, LeaseEnd.EXPIRED):
            return
        if end is not None or lease_id not in self._leases:
            raise _ended_error(lease_id, end)
        await self._end(lease_id, LeaseEnd.NACK)

    def expire(self) -> None:
        now = time.time()
        for lease_id in [i for i, lease in self._leases.items() if lease.expires_at <= now]:
            log.warning("lease %s was neither acked nor given back in time; its groups are back", lease_id)
            self._end(lease_id, LeaseEnd.EXPIRED)

    def _end(self, lease_id: str, kind: LeaseEnd) -> asyncio.Future[None]:
        lease = self._leases.pop(lease_id)
        self._ended[lease_id] = kind
        for group_id in lease.group_ids:
            group = self._groups[group_id]
            if kind is LeaseEnd.ACK:
                self._consume(group)
            else:
                group.lease_id = None
        self._metrics.leases.labels(kind.value).inc()
        self._events.publish("lease_ended", lease_id=lease_id, end=kind.value, groups=len(lease.group_ids))
        self._changed.set()
        return self._ledger.append(lease_end_row(lease_id, kind, time.time()))

    def _consume(self, group: Group) -> None:
        self.multi_version_calls += sum(s.multi_version_calls for s in group.seals.values())
        self._forget(group, "consumed")

    def counts(self) -> dict[str, int]:
        """Groups by state."""
        out = {
            "open": 0,
            "ready": 0,
            "leased": 0,
            "consumed": self._past["consumed"],
            "void": self._past["void"],
        }
        for g in self._groups.values():
            out["leased" if g.lease_id else "ready" if g.closed else "open"] += 1
        return out


def _ended_error(lease_id: str, end: LeaseEnd | None) -> GatewayError:
    if end is None:
        return GatewayError(f"no lease {lease_id!r}", status=404, code="unknown_lease")
    words = {LeaseEnd.ACK: "acked", LeaseEnd.NACK: "given back", LeaseEnd.EXPIRED: "expired"}[end]
    return GatewayError(
        f"lease {lease_id} was {words}; its groups may be in another batch, so discard this one",
        status=409,
        code="lease_expired" if end is LeaseEnd.EXPIRED else "lease_ended",
    )
