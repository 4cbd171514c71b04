"""Packing: nothing lost, nothing doubled, budgets kept, ranks in step; shapes as documented."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_trainers.attention import Layout
from areal_trainers.packing import Item, assign, pack

lengths_of = st.lists(st.integers(1, 60), max_size=40)


@given(lengths_of, st.integers(1, 100), st.integers(1, 4))
def test_every_sequence_once_and_ranks_in_step(lengths: list[int], budget: int, ranks: int) -> None:
    shares = assign(lengths, budget, ranks)
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1
    assert sorted(i for share in shares for micro in share for i in micro) == list(range(len(lengths)))


@given(lengths_of, st.integers(1, 100), st.integers(1, 4))
def test_a_micro_batch_passes_the_budget_only_as_a_single_sequence(
    lengths: list[int], budget: int, ranks: int
) -> None:
    for share in assign(lengths, budget, ranks):
        for micro in share:
            assert sum(lengths[i] for i in micro) <= budget or len(micro) == 1


@given(st.lists(st.integers(1, 20), min_size=16, max_size=60), st.integers(2, 4))
def test_rank_loads_differ_by_little(lengths: list[int], ranks: int) -> None:
    loads = [sum(lengths[i] for micro in share for i in micro) for share in assign(lengths, 64, ranks)]
    assert max(loads) - min(loads) <= 2 * max(lengths)


def test_the_budget_is_used() -> None:
    assert len(assign([100] * 40, 1000)[0]) == 4


@given(st.lists(st.integers(1, 70), min_size=1, max_size=20))
def test_a_layout_holds_each_token_once_and_pads_at_most_half(lengths: list[int]) -> None:
    layout, total = Layout.of(lengths), sum(lengths)
    pads, unpad = layout.padded.token, layout.padded.place
    assert len(set(unpad.tolist())) == len(unpad) == total
    assert pads[unpad].tolist() == list(range(total))
    assert len(pads) == sum(rows * width for rows, width in layout.classes) <= 2 * total


@settings(deadline=None)
@given(st.lists(st.integers(2, 12), min_size=1, max_size=6), st.randoms())
def test_packed_rows_predict_each_masked_token_from_the_one_before(lengths: list[int], random) -> None:
    items = []
    for n in lengths:
        mask = np.array([False] + [random.random() < 0.5 for _ in range(n - 1)])
        ids = np.array([random.randrange(1000) for _ in range(n)])
        items.append(Item(ids, mask, 0.5 + random.random(), {"id": ids[mask].astype(float)}))
    order = list(range(len(items)))
    random.shuffle(order)
    micro = pack(items, order)
    row = micro.token_ids[0]
    assert micro.labels.tolist() == row[micro.predict + 1].tolist()
    assert micro.labels.tolist() == micro.columns["id"].tolist()
    assert micro.position_ids[0].tolist() == [p for i in order for p in range(len(items[i]))]
    assert micro.temperatures.tolist() == [
        items[i].temperature for i in order for _ in range(items[i].predicted)
    ]


def test_a_rank_without_work_gets_a_row_that_predicts_nothing() -> None:
    micro = pack([], [])
    assert micro.token_ids.shape == (1, 1)
    assert len(micro.predict) == len(micro.labels) == 0
