"""Hidden states -> logprob and entropy of the predicted tokens, without all logits at once.

Invariant: one chunk of logits lives at a time, in forward and in backward. The forward keeps [N] numbers;
the backward computes each chunk's logits again and turns them in place into their own gradient, which is
known in closed form, and adds it to the gradients of hidden states and head weight (the idea of
Cut Cross-Entropy, arXiv:2411.09009, and of Liger Kernel, arXiv:2410.10989, without a kernel of our own).

With z = logits / temperature, p = softmax(z), H the entropy, y the label:
  d log p_y / dz_j = [j = y] - p_j        dH / dz_j = -p_j (log p_j + H)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 16 * 2**20
"""Logits in one chunk: 64 MiB in float32. Two such buffers live at a time. Larger ones are no faster."""


def token_logprobs(
    logits: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """([N] logprob of `labels`, [N] entropy), in nats, of softmax(logits / temperature).

    logits [N, V] any float dtype (computed in float32, or float64 as given), labels [N] int64,
    temperatures [N]. Both results carry gradients. For models that make their logits themselves;
    `head_logprobs` never holds them all.
    """
    z = _wide(logits) / temperatures.to(_wide_dtype(logits.dtype))[:, None]
    log_p = z.log_softmax(-1)
    return log_p.gather(-1, labels[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def head_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    temperatures: torch.Tensor,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `token_logprobs` of the logits `hidden @ weight.T + bias`, at most `chunk_elements` of them at a time.

    hidden [N, d], weight [V, d], bias [V] or None, of one dtype; labels [N] int64, temperatures [N].
    Differentiable once in hidden, weight and bias; a gradient nobody asks for is not computed.
    """
    return _Head.apply(hidden, weight, bias, labels, temperatures, max(1, chunk_elements // len(weight)))  # type: ignore[return-value]


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        temperatures: torch.Tensor,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = _wide_dtype(hidden.dtype)
        temperatures = temperatures.to(dtype)
        normalisers, logprobs, entropies = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(3))
        chunks = _Chunks(hidden, weight, bias, temperatures, rows)
        for part in chunks:
            z = chunks.logits(part)
            peak = z.amax(-1, keepdim=True)
            p = torch.sub(z, peak, out=chunks.scratch(z)).exp_()
            total = p.sum(-1)
            normaliser = total.log() + peak[:, 0]
            normalisers[part] = normaliser
            logprobs[part] = z.gather(-1, labels[part, None])[:, 0] - normaliser
            entropies[part] = normaliser - _row_dot(p, z) / total
        ctx.save_for_backward(hidden, weight, bias, labels, temperatures, normalisers, entropies)
        ctx.rows = rows
        ctx.set_materialize_grads(False)  # an entropy that is only logged has no gradient to compute
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, temperatures, normalisers, entropies = ctx.saved_tensors
        grad_logprob, grad_entropy = grads
        dtype = _wide_dtype(hidden.dtype)
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if to_hidden else None
        # Summed over chunks in the wide dtype: bfloat16 would drop what later chunks add.
        grad_weight = torch.zeros_like(weight, dtype=dtype) if to_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if to_bias else None
        chunks = _Chunks(hidden, weight, bias, temperatures, ctx.rows)
        for part in chunks if grad_logprob is not None or grad_entropy is not None else ():
            z = chunks.logits(part).sub_(normalisers[part, None])  # log p
            p = torch.exp(z, out=chunks.scratch(z))
            if grad_entropy is not None:
                # g_y ([j = y] - p_j) - g_H p_j (log p_j + H), without the first bracket's [j = y]
                z.add_(entropies[part, None]).mul_(grad_entropy[part, None])
                if grad_logprob is not None:
                    z.add_(grad_logprob[part, None])
                grad = z.mul_(p).neg_()
            else:
                assert grad_logprob is not None
                grad = p.mul_(grad_logprob[part, None]).neg_()
            if grad_logprob is not None:
                grad.scatter_add_(-1, labels[part, None], grad_logprob[part, None])
            grad.div_(temperatures[part, None])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                if dtype == hidden.dtype:
                    grad_weight.addmm_(grad.T, hidden[part])
                else:
                    grad_weight += grad.T @ hidden[part]
        if grad_logprob is None and grad_entropy is None and grad_hidden is not None:
            grad_hidden.zero_()
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
            None,
        )


class _Chunks:
    """Slices of at most `rows` rows, and two buffers that all chunks share: fresh ones would cost a page
    fault for every 4 KiB of logits."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        temperatures: torch.Tensor,
        rows: int,
    ) -> None:
        self._hidden, self._weight, self._bias, self._temperatures = hidden, weight, bias, temperatures
        self._rows = min(rows, max(1, len(hidden)))
        shape, dtype = (self._rows, len(weight)), _wide_dtype(hidden.dtype)
        self._logits, self._scratch = (hidden.new_empty(shape, dtype=dtype) for _ in range(2))

    def __iter__(self):
        count = len(self._hidden)
        return (slice(at, min(at + self._rows, count)) for at in range(0, count, self._rows))

    def logits(self, part: slice) -> torch.Tensor:
        """[n, V] logits of the rows divided by their temperature, in the first buffer."""
        h = self._hidden[part]
        z = self._logits[: len(h)]
        if z.dtype == h.dtype:
            torch.mm(h, self._weight.T, out=z)
        else:
            z.copy_(h @ self._weight.T)
        if self._bias is not None:
            z += self._bias
        return z.div_(self._temperatures[part, None])

    def scratch(self, like: torch.Tensor) -> torch.Tensor:
        return self._scratch[: len(like)]


def _row_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[n] sum over the last axis of a * b, without their product in memory."""
    return torch.bmm(a[:, None, :], b[:, :, None])[:, 0, 0]


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(_wide_dtype(x.dtype))
