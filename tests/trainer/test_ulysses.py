"""Ulysses over 2, 3 and 4 ranks gives dense attention's result and gradient; ranks are threads here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from areal_agent.config import RunConfig
from areal_agent.errors import ConfigError
from areal_trainers import ulysses
from areal_trainers.attention import Layout, Plan, packed_attention
from areal_trainers.packing import Item, pack
from areal_trainers.ulysses import SequenceGroup, check_heads


class Threads:
    """Stands for torch.distributed within one process: rank i is thread i, the group is this object."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=30)
        self._given: list[Any] = [None] * size
        self._own = threading.local()

    def run(self, work: Any) -> list[Any]:
        def one(rank: int) -> Any:
            self._own.rank = rank
            return work(SequenceGroup(self, rank, self.size))  # type: ignore[arg-type]

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[self._own.rank] = x.clone()
        self._barrier.wait()
        out = list(self._given)
        self._barrier.wait()
        return out

    @staticmethod
    def all_to_all_single(out: torch.Tensor, x: torch.Tensor, group: Threads) -> None:
        out.copy_(torch.stack([y[group._own.rank] for y in group._all(x)]))

    @staticmethod
    def all_gather(parts: list[torch.Tensor], x: torch.Tensor, group: Threads) -> None:
        for part, y in zip(parts, group._all(x), strict=True):
            part.copy_(y)


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ulysses, "dist", Threads)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], window: int | None):
    """The oracle: one softmax over an explicit [T, T] mask, head by head."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    back = torch.arange(len(owner))[:, None] - torch.arange(len(owner))[None]
    seen = (owner[:, None] == owner[None]) & (back >= 0) & (back < (window or len(owner)))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from([(2, 4, 2), (2, 4, 1), (4, 4, 2), (4, 8, 1), (3, 9, 3), (2, 2, 2)]),
    st.sampled_from([None, 3]),
)
def test_slices_of_any_row_give_dense_attention(lengths, heads_of, window) -> None:
    size, heads, kv_heads = heads_of
    total = sum(lengths)
    g = torch.Generator().manual_seed(total)
    whole = [
        torch.randn(total, h, 4, dtype=torch.float64, generator=g, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    ]
    seed = torch.randn(total, heads, 4, dtype=torch.float64, generator=g)
    wanted = dense(*whole, lengths, window)
    gradients = torch.autograd.grad((wanted * seed).sum(), whole)
    length = -(-total // size)

    def part(x: torch.Tensor, rank: int) -> torch.Tensor:
        padded = torch.nn.functional.pad(x.detach(), (0, 0, 0, 0, 0, length * size - total))
        return padded[rank * length : (rank + 1) * length]

    def work(group: SequenceGroup) -> tuple[torch.Tensor, ...]:
        own = [part(x, group.rank).clone().requires_grad_() for x in whole]
        out, _ = packed_attention(
            torch.nn.Module(),
            *(x.transpose(0, 1)[None] for x in own),
            None,
            sliding_window=window,
            areal_plan=Plan(Layout.of(lengths), sequence=group),
        )
        grads = torch.autograd.grad((out[0] * part(seed, group.rank)).sum(), own)
        return out[0].detach(), *grads

    slices = Threads(size).run(work)
    for got, want in zip(zip(*slices, strict=True), (wanted, *gradients), strict=True):
        torch.testing.assert_close(torch.cat(got)[:total], want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("lengths", [[1], [5, 2, 9], [7, 8, 1]])
@pytest.mark.parametrize("share", [False, True])
def test_the_slices_hold_the_row_once_and_gather_in_its_order(
    size: int, lengths: list[int], share: bool
) -> None:
    """With `share` sequences are beginnings of one another, and predictions lie in no order in the row."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 99, (len(lengths), max(lengths)))
    rows = [ids[0 if share else i, :n] for i, n in enumerate(lengths)]
    items = [Item(row, rng.random(len(row)) < 0.7, 0.5 + i) for i, row in enumerate(rows)]
    micro = pack(items, range(len(items)), share_prefixes=share)
    total = micro.token_ids.shape[1]
    assert total == (max if share else sum)(lengths)

    def work(group: SequenceGroup) -> tuple[Any, ...]:
        part, owner = group.cut(micro)
        values = torch.stack([part.labels.double(), part.temperatures]).requires_grad_()
        gathered = group.gather(values, owner)
        weights = torch.arange(gathered.numel()).view_as(gathered).double()
        (grad,) = torch.autograd.grad((gathered * weights).sum(), values)
        return part, owner, gathered.detach(), grad

    parts, owners, gathered, grads = zip(*Threads(size).run(work), strict=True)
    assert len({p.token_ids.shape for p in parts}) == 1
    assert torch.equal(torch.cat([p.token_ids for p in parts], 1)[:, :total], micro.token_ids)
    assert torch.equal(torch.cat([p.position_ids for p in parts], 1)[:, :total], micro.position_ids)
    for whole in gathered:
        assert torch.equal(whole, torch.stack([micro.labels.double(), micro.temperatures]))
    n = len(micro.labels)
    by_rank = owners[0].argsort(stable=True)
    assert torch.equal(torch.cat(grads, 1), torch.arange(2 * n).view(2, n).double()[:, by_rank])


def test_heads_that_do_not_divide_are_a_sentence() -> None:
    config = LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
    check_heads(config, 3)
    with pytest.raises(ConfigError, match=r"= 2 does not divide this model's 9 .* it can be 1, 3, 9"):
        check_heads(config, 2)


def test_ranks_that_do_not_divide_are_a_sentence() -> None:
    with pytest.raises(ConfigError, match="sequence_parallel = 2"):
        RunConfig.parse({"trainer": {"ranks": 3, "sequence_parallel": 2}})
