"""AdamW as torch's own, warm-up, clipping, and no step on a gradient that is no number."""

from __future__ import annotations

import pytest
import torch

from areal_trainers.optim import Optimizer


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.tensor([1.0, 2.0])), torch.nn.Parameter(torch.tensor([[3.0]]))]


def set_gradient(ps: list[torch.nn.Parameter], value: float) -> None:
    for p in ps:
        p.grad = torch.full_like(p, value)


def test_steps_as_adamw_does() -> None:
    ours, theirs = parameters(), parameters()
    mine = Optimizer(ours, learning_rate=0.1, weight_decay=0.01, grad_clip=1e9)
    reference = torch.optim.AdamW(theirs, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for value in (0.5, -0.1, 0.3):
        set_gradient(ours, value)
        set_gradient(theirs, value)
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_warm_up_is_linear_then_flat() -> None:
    ps = parameters()
    optimizer = Optimizer(ps, learning_rate=1.0, warmup_steps=4)
    rates = []
    for _ in range(6):
        rates.append(optimizer.learning_rate)
        set_gradient(ps, 0.1)
        optimizer.step()
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_reports_the_norm_before_clipping() -> None:
    ps = parameters()
    set_gradient(ps, 2.0)
    assert Optimizer(ps, learning_rate=0.1, grad_clip=0.1).step() == pytest.approx(2 * 3**0.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_changes_nothing(bad: float) -> None:
    ps = parameters()
    optimizer = Optimizer(ps, learning_rate=0.1)
    set_gradient(ps, 0.1)
    optimizer.step()
    before = [p.detach().clone() for p in ps]
    moments = [s["exp_avg"].clone() for s in optimizer.adamw.state.values()]
    set_gradient(ps, 0.1)
    ps[0].grad[1] = bad  # type: ignore[index]
    norm = optimizer.step()
    assert norm != norm or norm == float("inf")
    assert optimizer.steps == 1
    for p, b in zip(ps, before, strict=True):
        assert torch.equal(p, b)
        assert p.grad is None
    for s, m in zip(optimizer.adamw.state.values(), moments, strict=True):
        assert torch.equal(s["exp_avg"], m)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1.0, 1.0, 0.882843, 0.6, 0.317157, 0.2]),
    ],
)
def test_the_rate_follows_warm_up_and_schedule(schedule: str, rates: list[float]) -> None:
    """Two steps of warm-up, four down to a fifth of the peak, and no lower after the last."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = Optimizer(
        [weight], learning_rate=1.0, warmup_steps=2, schedule=schedule, total_steps=6, min_lr_ratio=0.2
    )
    found = []
    for _ in rates:
        found.append(optimizer.learning_rate)
        optimizer.steps += 1
    assert found == pytest.approx(rates, abs=1e-6)
