"""How far generation may run ahead of training: admission by version, never dropping.

Invariant: running + accepted ≤ (η + version + 1) · batch, counted in groups. By it a batch trained at
version v holds nothing older than v − η, because at most (η + 1) batches lie between admission and use.
(AReaL, arXiv:2505.24298, equation 3.) A group that turns out void gives its place back, so the count
cannot drift; on resume the groups trained before count as accepted.
"""

from __future__ import annotations


class Admission:
    """The count of groups. Plain arithmetic; the controller waits for `room`.

    Attributes:
        version: the policy's version as last seen; it never goes back, but by `resume`.
        running: groups admitted and not yet finished.
        accepted: groups finished and trainable, those trained already included.
    """

    def __init__(self, batch: int, max_staleness: int, *, version: int = 0, total: int | None = None) -> None:
        """Args:
        batch: groups in one training step.
        max_staleness: η ≥ 0; 0 is synchronous.
        version: where a resumed run starts; the `version · batch` groups before count as accepted.
        total: groups the whole run needs; admission ends there, so that nothing is generated in vain.
        """
        if batch < 1 or max_staleness < 0 or version < 0:
            raise ValueError(f"batch {batch}, max_staleness {max_staleness}, version {version}")
        self.batch = batch
        self.max_staleness = max_staleness
        self.version = version
        self.total = total
        self.running = 0
        self.accepted = version * batch

    @property
    def capacity(self) -> int:
        """Groups that may be running or accepted by now."""
        most = (self.max_staleness + self.version + 1) * self.batch
        return most if self.total is None else min(most, self.total)

    @property
    def room(self) -> int:
        """Groups that may be admitted now."""
        return max(0, self.capacity - self.running - self.accepted)

    def admit(self) -> None:
        if self.room < 1:
            raise RuntimeError(
                f"{self.running} running + {self.accepted} accepted groups fill {self.capacity}"
            )
        self.running += 1

    def finish(self, *, accepted: bool) -> None:
        """An admitted group ended: trainable, or void (which frees its place)."""
        if self.running < 1:
            raise RuntimeError("no group is running")
        self.running -= 1
        self.accepted += accepted

    def resume(self, version: int, accepted: int) -> None:
        """Begin at `version` with `accepted` groups that need no running. The one time the version may go back.

        Engines that outlived the run may hold a later version than the training state it goes on from.
        """
        self.version, self.accepted = version, accepted

    def advance(self, version: int) -> bool:
        """The policy is at `version`; returns whether that is news."""
        if version <= self.version:
            return False
        self.version = version
        return True
