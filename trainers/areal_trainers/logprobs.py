"""Hidden states -> logprob and entropy of the predicted tokens, without all logits at once.

Only the rows that are predicted reach the output head. Past `CHUNK_ELEMENTS` logits the head runs chunk
by chunk and its backward recomputes each chunk, so that one chunk of logits lives at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 32 * 2**20
"""Logits in one chunk: 128 MiB in float32, where recomputing starts to pay for itself."""


def token_logprobs(
    logits: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """([N] logprob of `labels`, [N] entropy), in nats, of softmax(logits / temperature).

    logits [N, V] any float dtype (computed in float32, or float64 as given), labels [N],
    temperatures [N]. Both results carry gradients.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scaled = wide / temperatures.to(wide.dtype)[:, None]
    normaliser = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, labels[:, None]).squeeze(-1) - normaliser
    p = torch.exp(scaled - normaliser[:, None])
    entropy = normaliser - (p * scaled).sum(-1)
    return logprobs, entropy


def head_logprobs(
    head: Callable[[torch.Tensor], torch.Tensor],
    vocabulary: int,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    temperatures: torch.Tensor,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `token_logprobs` of head(hidden [N, d]) -> [N, V], in chunks of at most `chunk_elements` logits."""

    def part(h: torch.Tensor, y: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(head(h), y, t)

    rows = max(1, chunk_elements // vocabulary)
    if len(hidden) <= rows:
        return part(hidden, labels, temperatures)
    pieces = [
        checkpoint(part, h, y, t, use_reentrant=False)
        for h, y, t in zip(hidden.split(rows), labels.split(rows), temperatures.split(rows), strict=True)
    ]
    logprobs, entropies = zip(*pieces, strict=True)  # type: ignore[arg-type]
    return torch.cat(logprobs), torch.cat(entropies)
