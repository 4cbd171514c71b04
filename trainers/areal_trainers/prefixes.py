"""Sequences that begin alike: siblings of one prompt, branches of one session, a system prompt of all.

Invariant: in a row that holds each common beginning once, a sequence's tokens are found along its own path,
in order; a token of the row has one position and one history, whichever path it is reached by. A causal
model gives it one hidden state, so whatever is computed of it once is exact for every sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

REPEATED = 0.25
"""What a token costs in every further sequence of its row, of what it costs in the first: attention alone computes
it again, and keeps it for the backward pass."""


class Beginnings:
    """What each of n sequences [L] of token ids has in common with the others.

    Sorted by their ids, those that begin alike are neighbours, and two of them have in common what the least
    alike neighbours between them have.
    """

    def __init__(self, sequences: Sequence[np.ndarray]) -> None:
        self.lengths = [len(s) for s in sequences]
        # Big-endian bytes sort as the numbers do, and as a whole.
        keys = [np.ascontiguousarray(s, dtype=">i8").tobytes() for s in sequences]
        self.order = sorted(range(len(sequences)), key=keys.__getitem__)
        self._rank = {i: rank for rank, i in enumerate(self.order)}
        pairs = zip(self.order[:-1], self.order[1:], strict=True)
        self._alike = np.array([0, *(_alike(sequences[a], sequences[b]) for a, b in pairs)], np.int64)

    def sorted(self, members: Sequence[int]) -> list[tuple[int, int]]:
        """(sequence, tokens in common with the one before it) in the order of their ids; 0 for the first."""
        out: list[tuple[int, int]] = []
        before = -1
        for rank in sorted(self._rank[i] for i in members):
            out.append((self.order[rank], int(self._alike[before + 1 : rank + 1].min()) if out else 0))
            before = rank
        return out

    def distinct(self, members: Sequence[int]) -> int:
        """Tokens of a row that holds these sequences, common beginnings once."""
        return sum(self.lengths[i] - alike for i, alike in self.sorted(members))

    def cost(self, members: Sequence[int]) -> float:
        """Of computing them in one row, in tokens that are in it once."""
        distinct = self.distinct(members)
        return distinct + REPEATED * (sum(self.lengths[i] for i in members) - distinct)

    def families(self, limit: float) -> list[list[int]]:
        """All n sequences, in families that cost at most `limit`; a neighbour joins with half of the shorter shared."""
        out: list[list[int]] = []
        held = 0.0
        for rank, i in enumerate(self.order):
            alike = int(self._alike[rank])
            shorter = min(self.lengths[i], self.lengths[self.order[rank - 1]])
            more = self.lengths[i] - alike + REPEATED * alike
            if out and 2 * alike >= shorter and held + more <= limit:
                out[-1].append(i)
                held += more
            else:
                out.append([i])
                held = self.lengths[i]
        return out


def paths(sequences: Sequence[np.ndarray]) -> tuple[list[np.ndarray], int]:
    """([L] place of each token in a row that holds common beginnings once, per sequence; tokens of that row)."""
    beginnings = Beginnings(sequences)
    found = [np.empty(0, np.int64)] * len(sequences)
    before, used = np.empty(0, np.int64), 0
    for i, alike in beginnings.sorted(range(len(sequences))):
        own = beginnings.lengths[i] - alike
        before = found[i] = np.concatenate([before[:alike], np.arange(used, used + own)])
        used += own
    return found, used


def _alike(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
