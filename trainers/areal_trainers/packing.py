"""Micro-batches: whole sequences packed without padding under a token budget, balanced over ranks.

Invariant: the micro-batches of all ranks hold every item exactly once, and every rank runs the same
number of them (a rank without work runs an empty one), so no collective is left waiting.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from areal_trainers.attention import Layout
from areal_trainers.prefixes import Beginnings, paths

WORTH_SHARING = 0.05
"""Smallest part of a row's tokens that is worth a path for each sequence."""


@dataclass(frozen=True)
class Item:
    """One sequence of L tokens as the trainer computes on it.

    Attributes:
        token_ids: [L] int64.
        loss_mask: [L] bool, tokens that are predicted; the first has nothing before it and never is.
        temperature: softmax temperature the logprobs are taken at.
        columns: name -> [n] float, one value per predicted token (n of them), in order.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    temperature: float = 1.0
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def predicted(self) -> int:
        return int(np.count_nonzero(self.loss_mask[1:]))


@dataclass(frozen=True)
class MicroBatch:
    """A packed row of T tokens, of which N are predicted.

    Attributes:
        items: indices of its items in the list that was packed, in packed order.
        token_ids, position_ids: [1, T] int64; positions are those within a token's sequence.
        layout: the attention layout of the row.
        predict: [N] places in the row, item after item, whose NEXT token in the item is predicted. Where items share
            their beginning a place may come several times, before a token of each.
        labels: [N] those next tokens.
        temperatures: [N] float.
        columns: name -> [N] float, the items' columns side by side.
    """

    items: tuple[int, ...]
    token_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: Layout
    predict: torch.Tensor
    labels: torch.Tensor
    temperatures: torch.Tensor
    columns: Mapping[str, torch.Tensor]


def assign(lengths: Sequence[int], budget: int, ranks: int = 1) -> list[list[list[int]]]:
    """[rank][micro-batch] -> indices of sequences.

    First-fit decreasing says how few bins suffice; that many, rounded up to a multiple of `ranks`, are
    then filled longest first into the emptiest, which levels them. Where levelling overflows the budget
    another bin per rank is taken. A sequence longer than the budget gets a bin of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = max(1, _first_fit(lengths, order, budget))
    count = -(-count // ranks) * ranks
    while (bins := _level(lengths, order, budget, count)) is None:
        count += ranks
    bins.sort(key=lambda b: -sum(lengths[i] for i in b))
    # Dealt out in snake order, so that rank loads stay level and heavy bins run side by side.
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    for start in range(0, count, ranks):
        row = bins[start : start + ranks]
        for rank, b in enumerate(row if (start // ranks) % 2 == 0 else reversed(row)):
            shares[rank].append(b)
    return shares


def plan(
    sequences: Sequence[np.ndarray], budget: int, ranks: int = 1, *, share_prefixes: bool = False
) -> list[list[list[int]]]:
    """As `assign`, of sequences [L] of token ids; with `share_prefixes`, those that begin alike together.

    They are dealt out in families, whose common beginning counts once, and a part of it for every further member.
    Large families save most and level worst, so several sizes are tried: the plan is taken whose busiest
    rank has the least to compute.
    """
    lengths = [len(s) for s in sequences]
    alone = assign(lengths, budget, ranks)
    if not share_prefixes or not sequences:
        return alone
    beginnings = Beginnings(sequences)
    cost = beginnings.cost

    def busiest(shares: list[list[list[int]]]) -> float:
        return max(sum(cost(micro) for micro in share) for share in shares)

    level = cost(range(len(sequences))) / ranks
    plans = [alone]
    for limit in (budget, level, level / 2):
        families = beginnings.families(min(limit, budget))
        shares = assign([math.ceil(cost(f)) for f in families], budget, ranks)
        plans.append([[[i for f in micro for i in families[f]] for micro in share] for share in shares])
    return min(plans, key=busiest)


def _first_fit(lengths: Sequence[int], order: Sequence[int], budget: int) -> int:
    room: list[int] = []
    for i in order:
        for j, left in enumerate(room):
            if lengths[i] <= left:
                room[j] -= lengths[i]
                break
        else:
            room.append(budget - lengths[i])
    return len(room)


def _level(lengths: Sequence[int], order: Sequence[int], budget: int, count: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, j) for j in range(count)]  # a heap of (tokens, bin)
    for i in order:
        load, j = emptiest[0]
        if load and load + lengths[i] > budget:
            return None
        bins[j].append(i)
        heapq.heapreplace(emptiest, (load + lengths[i], j))
    return bins


def pack(
    items: Sequence[Item],
    indices: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    share_prefixes: bool = False,
) -> MicroBatch:
    """The items of `indices` as one packed row. Without any: a row of one token that predicts nothing.

    With `share_prefixes` what items have in common at their beginning is in the row once, where that makes
    the row shorter by WORTH_SHARING.
    """
    chosen = [items[i] for i in indices] or [Item(np.zeros(1, np.int64), np.zeros(1, bool))]
    lengths = [len(item) for item in chosen]
    mask = np.concatenate([np.append(item.loss_mask[1:], False) for item in chosen])  # shifted: predict next
    tokens = np.concatenate([item.token_ids for item in chosen]).astype(np.int64)
    positions = np.concatenate([np.arange(n) for n in lengths])
    predict = np.flatnonzero(mask)
    path = _shared_path([item.token_ids for item in chosen]) if share_prefixes else None
    row, row_positions = tokens, positions
    if path is not None:
        row, row_positions = (np.empty(int(path.max()) + 1, np.int64) for _ in range(2))
        row[path], row_positions[path] = tokens, positions
    names = chosen[0].columns.keys() if indices else ()
    return MicroBatch(
        items=tuple(indices),
        token_ids=torch.from_numpy(row)[None].to(device),
        position_ids=torch.from_numpy(row_positions)[None].to(device),
        layout=Layout.of(lengths, device, path),
        predict=torch.from_numpy(predict if path is None else path[predict]).to(device),
        labels=torch.from_numpy(tokens[np.minimum(predict + 1, len(tokens) - 1)]).to(device),
        temperatures=torch.from_numpy(
            np.repeat([float(i.temperature) for i in chosen], [i.predicted for i in chosen])
        ).to(device),
        columns={
            name: torch.from_numpy(np.concatenate([np.asarray(i.columns[name]) for i in chosen])).to(device)
            for name in names
        },
    )


def _shared_path(sequences: Sequence[np.ndarray]) -> np.ndarray | None:
    """[E] token of the row that each token of the sequences is; None where too little is shared."""
    found, used = paths(sequences)
    path = np.concatenate(found)
    return path if used <= (1 - WORTH_SHARING) * len(path) else None
