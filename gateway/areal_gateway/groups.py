"""Groups of sessions, and the rule by which a lease takes them.

A group is *open* until all its sessions are sealed, then *ready*, or *void* when no session has both a
reward and something to train. A lease makes it *leased*, an ack *consumed*; a nack or the lease's end
makes it ready again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from areal_gateway.records import LeaseEnd, LeaseRecord, SealRecord


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
    def state(self) -> str:
        return "leased" if self.lease_id else "ready" if self.closed else "open"

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


@dataclass(frozen=True, slots=True)
class Undone:
    """What rewinds left behind.

    Attributes:
        leases: ids of those that no longer count, however they ended.
        again: batches (their group ids) still to be given out again, in order.
        repeated: leases that took a batch from there.
    """

    leases: set[str]
    again: deque[tuple[str, ...]]
    repeated: set[str]


def undo(leases: Seq[tuple[LeaseRecord, LeaseEnd | None]], rewinds: Seq[tuple[int, int]]) -> Undone:
    """The fold over all leases and rewinds.

    Args:
        leases: every lease with how it ended, oldest first.
        rewinds: (version, how many leases there were), oldest first.

    A rewind undoes the leases at its version or later. Of a group that several of those took (one was given
    back, the next had it), the last counts; a batch comes again where it is the last of all its groups.
    """
    undone: set[str] = set()
    repeated: set[str] = set()
    again: deque[tuple[str, ...]] = deque()
    standing: list[LeaseRecord] = []
    pending = deque(rewinds)

    def rewind(version: int) -> None:
        back = [lease for lease in standing if lease.version >= version]
        standing[:] = [lease for lease in standing if lease.version < version]
        undone.update(lease.lease_id for lease in back)
        last = {g: lease.lease_id for lease in back for g in lease.group_ids}
        whole = [b.group_ids for b in back if all(last[g] == b.lease_id for g in b.group_ids)]
        again.extendleft(reversed([batch for batch in whole if batch not in again]))

    for number, (lease, end) in enumerate(leases):
        while pending and pending[0][1] <= number:
            rewind(pending.popleft()[0])
        standing.append(lease)
        if again and again[0] == lease.group_ids:
            again.popleft()
            repeated.add(lease.lease_id)
            if end in (LeaseEnd.NACK, LeaseEnd.EXPIRED):
                again.appendleft(lease.group_ids)
    for version, _ in pending:
        rewind(version)
    return Undone(undone, again, repeated)
