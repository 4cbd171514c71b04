"""Which engine takes a call: the session's own, for its prefix cache, else the least loaded.

Invariant: a session's engine is only a preference. An engine that is full, or that takes no calls, gives its
sessions away, and new sessions go round, so that no engine has them all.
"""

from __future__ import annotations

from collections import OrderedDict

from areal_gateway.fleet.member import Member

SESSIONS_REMEMBERED = 65536
"""Sessions whose engine is remembered; the least recently used is forgotten first."""


class Router:
    """`full`: calls that one engine decodes at once."""

    def __init__(self, full: int) -> None:
        self._full = full
        self._of: OrderedDict[str, Member] = OrderedDict()

    def pick(self, session_id: str, routable: list[Member]) -> Member:
        """One of `routable`, which is not empty."""
        member, full = self._of.get(session_id), self._full
        if member in routable and (member.calls < full or all(m.calls >= full for m in routable)):
            self._of.move_to_end(session_id)
            return member
        member = min(routable, key=lambda m: (m.calls, m.assigned))
        member.assigned += 1
        self._of[session_id] = member
        self._of.move_to_end(session_id)
        if len(self._of) > SESSIONS_REMEMBERED:
            self._of.popitem(last=False)
        return member

    def forget(self, session_id: str) -> None:
        self._of.pop(session_id, None)
