"""One forward of a model over a batch, in micro-batches shared out over the ranks.

Invariant: every rank gets every item's numbers, whoever computed them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from areal_trainers.packing import Item, MicroBatch, pack, plan
from areal_trainers.ranks import Ranks

Forward = Callable[[MicroBatch], tuple[torch.Tensor, torch.Tensor]]


@torch.no_grad()
def evaluate(
    forward: Forward, items: Sequence[Item], ranks: Ranks, microbatch_tokens: int, share_prefixes: bool
) -> tuple[list[np.ndarray], float]:
    """(per item [n] float64 of the forward's first result, mean of its second), on every rank.

    forward: micro-batch -> ([N], [N]). The mean of no tokens is 0.
    """
    offsets = np.concatenate([[0], np.cumsum([i.predicted for i in items])]).astype(int)
    flat = np.zeros(int(offsets[-1]) + 1)  # the last place carries the sum of the second result
    for micro in micro_batches(items, ranks, microbatch_tokens, share_prefixes):
        first, second = forward(micro)
        values = first.double().cpu().numpy()
        flat[-1] += float(second.double().sum())
        at = 0
        for i in micro.items:
            n = items[i].predicted
            flat[offsets[i] : offsets[i + 1]] = values[at : at + n]
            at += n
    whole = ranks.sum_array(flat)
    return [whole[a:b] for a, b in itertools.pairwise(offsets)], float(whole[-1] / max(1, offsets[-1]))


def micro_batches(
    items: Sequence[Item], ranks: Ranks, microbatch_tokens: int, share_prefixes: bool
) -> Iterator[MicroBatch]:
    """This rank's part of the items, packed; the settings are those of the same names in `trainer`."""
    sequences = [i.token_ids for i in items]
    shares = plan(sequences, microbatch_tokens, ranks.data_size, share_prefixes=share_prefixes)
    for indices in shares[ranks.data_rank]:
        yield pack(items, indices, ranks.device, share_prefixes=share_prefixes)
