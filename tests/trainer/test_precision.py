"""bfloat16 computes, float32 remembers: master weights, gradients and moments, whatever the compute dtype."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from trainer_kit import VOCAB, make_model

from areal_trainers.model import Policy, load_causal_lm, shard
from areal_trainers.optim import Optimizer
from areal_trainers.packing import Item, MicroBatch, pack
from areal_trainers.platform import get_platform
from areal_trainers.ranks import Ranks, join_ranks

TOO_SMALL = 1e-3
"""An update of a weight of 1 that bfloat16 rounds away: its neighbours are 2^-8 below and 2^-7 above."""


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with join_ranks(get_platform("cpu")) as joined:
        yield joined


def bf16_policy(tmp_path: Path, ranks: Ranks) -> Policy:
    return shard(load_causal_lm(make_model(tmp_path / "model")), ranks.mesh, torch.bfloat16)


def micro() -> MicroBatch:
    rng = np.random.default_rng(0)
    items = [Item(rng.integers(0, VOCAB, n), np.ones(n, bool)) for n in (7, 12, 5)]
    return pack(items, range(len(items)))


def test_weights_gradients_and_moments_are_float32(tmp_path: Path, ranks: Ranks) -> None:
    policy = bf16_policy(tmp_path, ranks)
    optimizer = Optimizer(policy.parameters(), learning_rate=0.01)
    inside: list[torch.dtype] = []
    layer = policy.lm.get_decoder().layers[0].mlp
    layer.register_forward_hook(lambda module, args, out: inside.append(out.dtype))
    (-policy(micro())[0].sum()).backward()
    assert inside == [torch.bfloat16]
    for name, p in policy.named_parameters():
        assert p.dtype == torch.float32, name
        assert p.grad is not None
        assert p.grad.dtype == torch.float32, name
    optimizer.step()
    for name, p in policy.named_parameters():
        assert {m.dtype for m in optimizer.moments(p).values()} == {torch.float32}, name
        assert p.dtype == torch.float32, name


def test_an_update_below_the_resolution_of_bfloat16_is_not_lost(tmp_path: Path, ranks: Ranks) -> None:
    """AdamW's step on a constant gradient is the learning rate: 8 of them must add up to 8 rates."""
    policy = bf16_policy(tmp_path, ranks)
    norm = policy.lm.get_decoder().norm.weight  # fully sharded, all of it here
    with torch.no_grad():
        norm.fill_(1.0)
    optimizer = Optimizer([norm], learning_rate=TOO_SMALL, grad_clip=1e9)
    alone = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    naive = torch.optim.AdamW([alone], lr=TOO_SMALL, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, 9):
        norm.grad, alone.grad = torch.full_like(norm, 0.5), torch.full_like(alone, 0.5)
        optimizer.step()
        naive.step()
        if step == 1:
            assert bool((norm.full_tensor().bfloat16() == 1.0).all())  # the engine does not see it yet
    torch.testing.assert_close(
        norm.full_tensor(), torch.full((len(norm),), 1.0 - 8 * TOO_SMALL), atol=1e-6, rtol=0
    )
    assert bool((norm.full_tensor().bfloat16() < 1.0).all())
    assert bool((alone == 1.0).all())  # what happens where bfloat16 remembers


def test_a_small_model_learns_in_bfloat16(tmp_path: Path, ranks: Ranks) -> None:
    policy, batch = bf16_policy(tmp_path, ranks), micro()
    optimizer = Optimizer(policy.parameters(), learning_rate=1e-2)
    losses = []
    for _ in range(40):
        loss = -policy(batch)[0].mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 3
    assert losses[-1] < 0.3, losses
