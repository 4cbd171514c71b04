"""Groups of sessions, and their leases to the trainer.

Invariant: while a trainer asks for at most η versions of staleness, no token it is given was sampled more
than η versions before the version it is given at. Nothing is dropped to achieve this: a lease waits for
the groups that would otherwise exceed η at the next version, and takes them (oldest first).

Where others admit the sessions (online mode: `shed`), no formula bounds how many there are, and a
conversation may last for hours. A lease then waits for nobody in particular: it takes the oldest groups that
are ready, exactly as many as were asked for, and a group that is ready too late is void, and said to be.

A trainer that resumes from a checkpoint has lost the versions after it. It *rewinds* to the checkpoint's
version: the batches leased at that version or later are undone and given out again, the same groups in the
same order, before anything else. Retraining them makes the lost versions again, bit for bit, so the versions
stamped on tokens that were sampled meanwhile stay true.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from uuid import uuid4

from areal_agent.errors import GatewayError
from areal_agent.trajectory import Batch
from areal_gateway.credit import Credit
from areal_gateway.events import EventBus
from areal_gateway.groups import Choice, Group, choose, undo
from areal_gateway.ledger import Ledger
from areal_gateway.metrics import Metrics
from areal_gateway.records import LeaseEnd, LeaseRecord, SealRecord, SessionRecord
from areal_gateway.rows import lease_end_row, lease_rows, rewind_row, void_row
from areal_gateway.trajectories import fold

log = logging.getLogger(__name__)

Version = Callable[[], int]
"""Reads the fleet's committed version."""

POLL_S = 0.25
"""A waiting lease looks again this often, besides being woken: versions change without telling us."""
SAY_S = 30.0
"""A lease that waits this long says whom it waits for."""
ABANDONED = "the run that opened it ended before its sessions did"


class Leases:
    """Who trains what. All methods run on the event loop."""

    def __init__(
        self,
        ledger: Ledger,
        events: EventBus,
        metrics: Metrics,
        credit: Credit | None = None,
        *,
        shed: bool = False,
    ) -> None:
        self._credit = credit or Credit()
        self._shed = shed
        self._ledger = ledger
        self._events = events
        self._metrics = metrics
        self._groups: dict[str, Group] = {}
        self._leases: dict[str, LeaseRecord] = {}
        self._ended: dict[str, LeaseEnd] = {}
        self._again: deque[tuple[str, ...]] = deque()
        """Batches (their group ids) to be given out again after a rewind, in their old order."""
        self._repeated: dict[str, tuple[str, ...]] = {}
        """Lease -> the batch it took from there: where it is not acked, that is the next one again."""
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
        """After the sessions were restored: what an earlier process leased, acked, rewound and gave up.

        An open lease gets its whole time again: that it was renewed is not in the ledger.
        """
        for group_id, why in self._ledger.voids().items():
            if group_id in self._groups:
                self._forget(self._groups[group_id], "void", why)
        leases = self._ledger.leases()
        rewound = undo(leases, self._ledger.rewinds())
        self._again = rewound.again
        now = time.time()
        for lease, end in leases:
            end = LeaseEnd.REWOUND if lease.lease_id in rewound.leases else end
            if end is not None:
                self._ended[lease.lease_id] = end
            else:
                whole = now + lease.expires_at - lease.at
                self._leases[lease.lease_id] = replace(lease, expires_at=max(lease.expires_at, whole))
                if lease.lease_id in rewound.repeated:
                    self._repeated[lease.lease_id] = lease.group_ids
            for group in [self._groups[g] for g in lease.group_ids if g in self._groups]:
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
            if self._again:
                return await self._grant(tuple(self._groups[g] for g in self._again[0]), now, lease_s)
            self._void_stale(max_staleness, now)
            bound = None if self._shed else max_staleness
            choice = choose(list(self._groups.values()), want=want, max_staleness=bound, version=now)
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
        """Never happens while admission keeps to its formula; a lease that was lost may cause it.

        With `shed` it is how traffic that is more than the trainer can take is left out.
        """
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
        if self._again and self._again[0] == lease.group_ids:
            self._repeated[lease.lease_id] = self._again.popleft()
        self._leases[lease.lease_id] = lease
        try:
            await self._ledger.append(*lease_rows(lease))
            ids = [s for g in groups for s in g.session_ids]
            batch = await asyncio.to_thread(self._fold, lease, ids)
        except BaseException:  # the trainer left, or the ledger failed: nobody holds this lease
            if lease.lease_id in self._leases:  # else it ended by itself meanwhile
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
        if end in (LeaseEnd.NACK, LeaseEnd.EXPIRED, LeaseEnd.REWOUND):
            return
        if end is not None or lease_id not in self._leases:
            raise _ended_error(lease_id, end)
        await self._end(lease_id, LeaseEnd.NACK)

    def renew(self, lease_id: str, lease_s: float) -> None:
        """The lease ends `lease_s` from now at the earliest. Raises GatewayError like `ack`."""
        self.expire()
        lease = self._leases.get(lease_id)
        if lease is None:
            raise _ended_error(lease_id, self._ended.get(lease_id))
        later = max(lease.expires_at, time.time() + lease_s)
        self._leases[lease_id] = replace(lease, expires_at=later)

    async def rewind(self, version: int) -> int:
        """Undo every batch leased at `version` or later; returns how many are to be leased again.

        The trainer stands at `version` again: what it had trained since is lost, whether it was acked or not.
        Rewinding twice changes nothing more. A trainer that still holds one of the leases may not ack it.
        """
        await self._ledger.append(rewind_row(version, time.time()))
        leases = self._ledger.leases()
        rewound = undo(leases, self._ledger.rewinds())
        self._again = rewound.again
        for lease, _ in leases:
            if lease.lease_id in rewound.leases and self._ended.get(lease.lease_id) is not LeaseEnd.REWOUND:
                self._leases.pop(lease.lease_id, None)
                self._repeated.pop(lease.lease_id, None)
                self._ended[lease.lease_id] = LeaseEnd.REWOUND
        self._bring_back({g for batch in self._again for g in batch})
        self._events.publish("rewound", version=version, batches=len(self._again))
        log.warning("rewound to version %d: %d batches are leased again", version, len(self._again))
        self._changed.set()
        return len(self._again)

    def _bring_back(self, group_ids: set[str]) -> None:
        """Groups of undone leases are ready again; of those consumed, only the ledger still knows."""
        for group_id in group_ids & self._groups.keys():
            self._groups[group_id].lease_id = None
        for session, seal in self._ledger.sessions(group_ids - self._groups.keys()):
            if session.group_id not in self._groups:
                self._past["consumed"] -= 1
            self.opened(session)
            if seal is not None:
                self._groups[session.group_id].seals[session.session_id] = seal
                self.multi_version_calls -= seal.multi_version_calls

    async def abandon(self) -> list[str]:
        """Void every group that is still open: nobody will finish it. Returns their ids."""
        given_up = [g for g in self._groups.values() if not g.closed]
        for group in given_up:
            self._forget(group, "void", ABANDONED)
        if given_up:
            now = time.time()
            await self._ledger.append(*(void_row(g.group_id, ABANDONED, now) for g in given_up))
        return [g.group_id for g in given_up]

    def states(self) -> dict[str, str]:
        """Group id -> open, ready, leased, consumed, void or abandoned: every group there ever was.

        Reads the whole ledger: call it from where a resumed run counts what it has, not from a loop.
        """
        acked = {
            g
            for lease, _ in self._ledger.leases()
            for g in lease.group_ids
            if self._ended.get(lease.lease_id) is LeaseEnd.ACK
        }
        abandoned = self._ledger.voids()
        out: dict[str, str] = {}
        for session, _ in self._ledger.sessions():
            if session.purpose == "train":
                group = self._groups.get(session.group_id)
                past = "consumed" if session.group_id in acked else "void"
                past = "abandoned" if session.group_id in abandoned else past
                out[session.group_id] = past if group is None else group.state
        return out

    def expire(self) -> None:
        now = time.time()
        for lease_id in [i for i, lease in self._leases.items() if lease.expires_at <= now]:
            log.warning("lease %s was neither acked nor given back in time; its groups are back", lease_id)
            self._end(lease_id, LeaseEnd.EXPIRED)

    def _end(self, lease_id: str, kind: LeaseEnd) -> asyncio.Future[None]:
        lease = self._leases.pop(lease_id)
        self._ended[lease_id] = kind
        repeated = self._repeated.pop(lease_id, None)
        if repeated is not None and kind is not LeaseEnd.ACK:
            self._again.appendleft(repeated)
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
            out[g.state] += 1
        return out


def _ended_error(lease_id: str, end: LeaseEnd | None) -> GatewayError:
    if end is None:
        return GatewayError(f"no lease {lease_id!r}", status=404, code="unknown_lease")
    words = {
        LeaseEnd.ACK: "acked",
        LeaseEnd.NACK: "given back",
        LeaseEnd.EXPIRED: "expired",
        LeaseEnd.REWOUND: "undone by a rewind",
    }[end]
    return GatewayError(
        f"lease {lease_id} was {words}; its groups may be in another batch, so discard this one",
        status=409,
        code="lease_expired" if end is LeaseEnd.EXPIRED else "lease_ended",
    )
