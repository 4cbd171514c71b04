"""The fused output head: the naive formula's values and gradients, for any shape, one chunk at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_trainers.logprobs import head_logprobs, token_logprobs


def problem(n: int, v: int, d: int, bias: bool, seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    f64 = {"dtype": torch.float64, "generator": g}
    hidden, weight = torch.randn(n, d, **f64), torch.randn(v, d, **f64)
    offset = torch.randn(v, **f64) if bias else None
    labels, temperatures = torch.randint(v, (n,), generator=g), torch.rand(n, **f64) + 0.5
    return hidden, weight, offset, labels, temperatures  # type: ignore[return-value]


def naive(hidden, weight, bias, labels, temperatures) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (torch.nn.functional.linear(hidden, weight, bias) / temperatures[:, None]).log_softmax(-1)
    entropy = torch.distributions.Categorical(logits=log_p, validate_args=False).entropy()
    return log_p[torch.arange(len(labels)), labels], entropy


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 9),
    st.integers(1, 12),
    st.integers(1, 5),
    st.booleans(),
    st.integers(1, 60),
    st.sampled_from(["logprob", "entropy", "both"]),
)
def test_values_and_gradients_are_the_naive_ones(n, v, d, bias, chunk, used) -> None:
    results = []
    for function, extra in ((naive, ()), (head_logprobs, (chunk,))):
        hidden, weight, offset, labels, temperatures = problem(n, v, d, bias)
        leaves = [x.requires_grad_() for x in (hidden, weight, offset) if x is not None]
        logp, entropy = function(hidden, weight, offset, labels, temperatures, *extra)
        ramp = torch.arange(1.0, n + 1, dtype=torch.float64)
        total = {
            "logprob": (logp * ramp).sum(),
            "entropy": (entropy * ramp**2).sum(),
            "both": (logp * ramp + entropy * ramp**2).sum(),
        }[used]
        results.append([logp, entropy, *torch.autograd.grad(total, leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("chunk", [1, 14, 10**6])
@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck(chunk: int, bias: bool) -> None:
    hidden, weight, offset, labels, temperatures = problem(5, 7, 3, bias)
    leaves = tuple(x.requires_grad_() for x in (hidden, weight, offset) if x is not None)
    assert torch.autograd.gradcheck(
        lambda h, w, b=None: head_logprobs(h, w, b, labels, temperatures, chunk), leaves
    )


def test_logprob_and_entropy_against_numpy() -> None:
    rng = np.random.default_rng(0)
    logits, labels, t = rng.normal(0, 3, (11, 7)), rng.integers(0, 7, 11), rng.uniform(0.3, 2, 11)
    p = np.exp(logits / t[:, None])
    p /= p.sum(-1, keepdims=True)
    eye = torch.eye(7, dtype=torch.float64)
    given_logits = token_logprobs(torch.tensor(logits), torch.tensor(labels), torch.tensor(t))
    by_head = head_logprobs(torch.tensor(logits), eye, None, torch.tensor(labels), torch.tensor(t), 14)
    for logp, entropy in (given_logits, by_head):
        np.testing.assert_allclose(logp, np.log(p[np.arange(11), labels]), atol=1e-12)
        np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), atol=1e-12)


def test_logits_far_from_zero_do_not_overflow() -> None:
    hidden = torch.tensor([[3e4], [-3e4]])
    weight = torch.tensor([[1.0], [0.5], [0.0]])
    logp, entropy = head_logprobs(hidden, weight, None, torch.tensor([0, 0]), torch.ones(2))
    assert logp.tolist() == [0.0, -3e4]
    torch.testing.assert_close(entropy, torch.zeros(2), atol=4e-3, rtol=0)  # float32 rounds at 3e4


def test_a_tied_weight_gets_the_gradient_of_both_uses() -> None:
    _, weight, _, labels, temperatures = problem(6, 9, 4, False)
    ids = torch.tensor([1, 1, 4, 0, 8, 2])
    grads = []
    for function in (naive, head_logprobs):
        w = weight.clone().requires_grad_()
        function(w[ids], w, None, labels, temperatures)[0].sum().backward()
        grads.append(w.grad)
    torch.testing.assert_close(grads[0], grads[1], atol=1e-12, rtol=0)


def test_a_frozen_weight_gets_no_gradient_and_the_hidden_states_theirs() -> None:
    hidden, weight, _, labels, temperatures = problem(6, 9, 4, False)
    hidden.requires_grad_()
    head_logprobs(hidden, weight, None, labels, temperatures)[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_bfloat16_gradients_are_summed_over_chunks_in_float32() -> None:
    """A bfloat16 accumulator would lose the last chunks: 256 + 1 = 256 there."""
    n = 512
    hidden = torch.ones(n, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    head_logprobs(hidden, weight, None, torch.zeros(n, dtype=torch.int64), torch.ones(n), 2)[
        0
    ].sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad[:, 0].tolist() == [n / 2, -n / 2]


@pytest.mark.parametrize("chunk", [40, 400])
def test_no_tensor_is_larger_than_a_chunk_or_an_argument(chunk: int) -> None:
    """The full logits are [60, 50]; nothing of their size may ever be allocated."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, torch.Tensor):
                    self.seen = max(self.seen, x.untyped_storage().nbytes() // x.element_size())
            return out

    hidden, weight, _, labels, temperatures = problem(60, 50, 4, False)
    hidden.requires_grad_()
    weight.requires_grad_()
    with Largest() as largest:
        head_logprobs(hidden, weight, None, labels, temperatures, chunk)[0].sum().backward()
    assert largest.seen <= max(chunk, 50, hidden.numel(), weight.numel())
