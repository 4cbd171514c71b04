"""Sequence parallelism: a packed row cut over the ranks of a group (DeepSpeed-Ulysses, arXiv:2309.14509).

Token-wise layers work on a rank's own slice of consecutive tokens. Around attention one all-to-all trades
"all heads of my tokens" for "all tokens of my heads" and one trades back, so attention is the same kernel
on whole sequences with fewer heads. Each rank takes the logprobs of its own slice; only those are gathered.

Invariant: every rank of the group ends with the same logprobs of the whole row, and its gradient is the
share that went through its own slice: the sum over ranks is the gradient of one rank with the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import PreTrainedConfig

from areal_agent.errors import ConfigError
from areal_trainers.packing import MicroBatch


@dataclass(frozen=True)
class SequenceGroup:
    """The `size` > 1 ranks that share each packed row; this one holds slice `rank`."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def cut(self, micro: MicroBatch) -> tuple[MicroBatch, torch.Tensor]:
        """(this rank's slice, [N] the rank whose slice predicts each of the row's tokens).

        The row is padded behind its end to `size` slices of one length. The slice keeps global positions
        and the whole row's layout; `predict` counts from the slice's start. It has no columns.
        """
        tokens = micro.token_ids.shape[1]
        length = -(-tokens // self.size)
        padding = (0, length * self.size - tokens)
        own = slice(self.rank * length, (self.rank + 1) * length)
        owner = micro.predict // length
        predicted = owner == self.rank
        return (
            replace(
                micro,
                token_ids=F.pad(micro.token_ids, padding)[:, own],
                position_ids=F.pad(micro.position_ids, padding)[:, own],
                predict=micro.predict[predicted] - own.start,
                labels=micro.labels[predicted],
                temperatures=micro.temperatures[predicted],
                columns={},
            ),
            owner,
        )

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query [t, H, D], key and value [t, Hk, D] of this slice -> [T, H/size, D], [T, max(1, Hk/size), D].

        `tokens` is T, the row without its padding. Fewer key heads than ranks are repeated, so that every
        rank has the one its queries belong to.
        """
        if (repeat := self.size // key.shape[1]) > 1:
            key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
        heads, kv_heads = query.shape[1] // self.size, key.shape[1] // self.size
        parts = [x.unflatten(1, (self.size, -1)) for x in (query, key, value)]  # [t, size, heads, D]
        traded = _exchange(torch.cat(parts, 2).transpose(0, 1), self.group)  # [size, t, heads + 2 kv, D]
        query, key, value = traded.flatten(0, 1)[:tokens].split([heads, kv_heads, kv_heads], 1)
        return query, key, value

    def to_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """[T, H/size, D] of these heads -> [t, H, D] of this slice."""
        length = -(-len(output) // self.size)
        padded = F.pad(output, (0, 0, 0, 0, 0, length * self.size - len(output)))
        traded = _exchange(padded.unflatten(0, (self.size, length)), self.group)  # [size, t, H/size, D]
        return traded.transpose(0, 1).flatten(1, 2)

    def gather(self, values: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        """[k, n] of the tokens that this slice predicts -> [k, N] of all, in the row's order, on every rank.

        owner: as `cut` gave it. Every rank computes the same loss from the result, so backward keeps this slice's columns and adds
        nothing up.
        """
        return _Gather.apply(values, owner, self)  # type: ignore[return-value]


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[size, ...]: part i goes to rank i; part j of the result came from rank j."""
    return _Exchange.apply(x, group)  # type: ignore[return-value]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(grads[0], ctx.group), None  # its own inverse, hence its own transpose


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, owner: torch.Tensor, own: SequenceGroup) -> torch.Tensor:
        ctx.columns = owner == own.rank
        counts = torch.bincount(owner, minlength=own.size).tolist()
        padded = F.pad(values, (0, max(counts) - values.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=own.group)
        by_rank = torch.cat([part[:, :n] for part, n in zip(parts, counts, strict=True)], 1)
        return torch.empty_like(by_rank).index_copy_(1, owner.argsort(stable=True), by_rank)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0][:, ctx.columns], None, None


def check_heads(config: PreTrainedConfig, size: int) -> None:
    """Raise ConfigError where this model's heads cannot be dealt out to `size` ranks."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or (kv_heads % size and size % kv_heads):
        possible = [
            n for n in range(1, heads + 1) if not heads % n and (not kv_heads % n or not n % kv_heads)
        ]
        raise ConfigError(
            f"trainer.sequence_parallel = {size} does not divide this model's {heads} attention heads and "
            f"{kv_heads} key-value heads; it can be {', '.join(map(str, possible))}"
        )
