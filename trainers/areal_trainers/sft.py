"""Supervised fine-tuning on the trainer's own engine: packed, sharded, losses only where the mask says.

`train_sft` works in a plain process and under torchrun; `python -m areal_trainers.sft --help` is the same
as a program. Its loss is the mean negative logprob over the predicted tokens of a whole step, so that
micro-batches and ranks are invisible.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from areal_agent.errors import ArealError, ConfigError
from areal_trainers import checkpoint
from areal_trainers.model import Policy, load_causal_lm, shard
from areal_trainers.optim import Optimizer
from areal_trainers.packing import Item, assign, pack
from areal_trainers.platform import get_platform
from areal_trainers.ranks import Ranks, join_ranks


@dataclass(frozen=True)
class SftStep:
    """One optimiser step: mean loss (nats per predicted token), tokens computed, seconds since the start."""

    step: int
    loss: float
    grad_norm: float
    tokens: int
    predicted: int
    elapsed_s: float


@dataclass(frozen=True)
class SftResult:
    """What `train_sft` did: where the model is, steps taken, mean loss of the last ten, tokens a second."""

    model: Path
    steps: int
    loss: float
    tokens: int
    tokens_per_s: float
    wall_s: float


def train_sft(
    model_dir: str | Path,
    out_dir: str | Path,
    examples: Iterable[tuple[list[int], list[bool]]],
    *,
    seconds: float | None = None,
    steps: int | None = None,
    batch_tokens: int = 4096,
    learning_rate: float = 3e-3,
    warmup_steps: int = 10,
    decay: bool = False,
    weight_decay: float = 0.0,
    microbatch_tokens: int = 4096,
    seed: int = 0,
    platform: str = "auto",
    compute_dtype: str = "float32",
    on_step: Callable[[SftStep], bool | None] | None = None,
) -> SftResult:
    """Train the model in `model_dir` and write it, tokenizer included, to `out_dir`.

    Args:
        examples: (token_ids [L], loss_mask [L]) pairs; a token is predicted where its mask is set.
        seconds, steps: stop after whichever comes first; at least one is given. Time starts at step 1.
        batch_tokens: tokens (prompts included) in one optimiser step, over all ranks.
        decay: lower the learning rate linearly to a tenth of its peak over the budget.
        on_step: called on rank 0 after each step; returning True stops early.

    Raises ConfigError for a model or an example that cannot be used.
    """
    if seconds is None and steps is None:
        raise ConfigError("train_sft needs `seconds`, `steps` or both, else it would never stop")
    items = [_item(i, ids, mask) for i, (ids, mask) in enumerate(examples)]
    if not items:
        raise ConfigError("train_sft got no examples")
    torch.manual_seed(seed)
    device_family = get_platform(platform)
    with join_ranks(device_family) as ranks:
        lm = load_causal_lm(model_dir)
        policy = shard(lm, ranks.mesh, getattr(torch, compute_dtype), kernel=device_family.attention)
        optimizer = Optimizer(
            policy.parameters(),
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            weight_decay=weight_decay,
        )
        losses: list[float] = []
        tokens, start = 0, time.monotonic()
        for step, indices in enumerate(_batches(items, batch_tokens, seed), 1):
            chosen = [items[i] for i in indices]
            spent = max(
                (step - 1) / steps if steps else 0.0, (time.monotonic() - start) / seconds if seconds else 0.0
            )
            # Ranks must agree when to stop, and their clocks do not: rank 0's fraction counts.
            spent = ranks.max([spent if ranks.first else 0.0])[0]
            if spent >= 1.0:
                break
            optimizer.peak = learning_rate * (1.0 - 0.9 * spent) if decay else learning_rate
            loss = _loss_and_gradient(policy, ranks, chosen, microbatch_tokens)
            norm = optimizer.step()
            losses.append(loss)
            tokens += sum(map(len, chosen))
            report = SftStep(
                step,
                loss,
                norm,
                sum(map(len, chosen)),
                sum(i.predicted for i in chosen),
                time.monotonic() - start,
            )
            stop = bool(on_step(report)) if ranks.first and on_step else False
            if ranks.max([float(stop)])[0]:
                break
        wall = time.monotonic() - start
        out = checkpoint.export(lm, Path(out_dir), Path(model_dir), write=ranks.first)
    recent = losses[-10:]
    return SftResult(
        model=out,
        steps=len(losses),
        loss=sum(recent) / len(recent) if recent else math.nan,
        tokens=tokens,
        tokens_per_s=tokens / wall if wall else 0.0,
        wall_s=wall,
    )


def _loss_and_gradient(policy: Policy, ranks: Ranks, items: list[Item], budget: int) -> float:
    """Mean loss over all predicted tokens of the step; leaves its gradient in the parameters."""
    total = sum(i.predicted for i in items)
    loss_sum = 0.0
    for indices in assign([len(i) for i in items], budget, ranks.data_size)[ranks.data_rank]:
        logprobs, _ = policy(pack(items, indices, ranks.device))
        loss = -logprobs.sum()
        (loss * (ranks.size / total)).backward()
        loss_sum += float(loss.detach())
    return ranks.sum([loss_sum])[0] / total


def _batches(items: list[Item], batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """Endless epochs, each in its own order, cut into steps of at most `batch_tokens` (at least one item)."""
    rng = np.random.default_rng(seed)
    current: list[int] = []
    size = 0
    while True:
        for i in rng.permutation(len(items)).tolist():
            if current and size + len(items[i]) > batch_tokens:
                yield current
                current, size = [], 0
            current.append(i)
            size += len(items[i])


def _item(index: int, token_ids: list[int], loss_mask: list[bool]) -> Item:
    if len(token_ids) != len(loss_mask):
        raise ConfigError(f"example {index} has {len(token_ids)} tokens but {len(loss_mask)} mask values")
    item = Item(np.asarray(token_ids, np.int64), np.asarray(loss_mask, bool))
    if not item.predicted:
        raise ConfigError(f"example {index} predicts no token (its mask is unset after the first token)")
    return item


def read_examples(path: Path) -> list[tuple[list[int], list[bool]]]:
    """JSON lines of {"token_ids": [...], "loss_mask": [...]}. Raises ConfigError naming the line."""
    out = []
    try:
        with path.open() as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                    out.append((list(row["token_ids"]), [bool(m) for m in row["loss_mask"]]))
                except (ValueError, KeyError, TypeError) as e:
                    raise ConfigError(
                        f"{path}, line {number}: not an object with token_ids and loss_mask ({e!r})"
                    ) from e
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e}") from e
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m areal_trainers.sft", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", required=True, type=Path, help="Hugging Face model folder to start from")
    parser.add_argument("--out", required=True, type=Path, help="folder to write the trained model to")
    parser.add_argument("--data", required=True, type=Path, help="JSON lines with token_ids and loss_mask")
    parser.add_argument("--seconds", type=float, help="stop after this much training")
    parser.add_argument("--steps", type=int, help="stop after this many optimiser steps")
    parser.add_argument(
        "--batch-tokens", type=int, default=4096, help="tokens in one step (default %(default)s)"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="AdamW peak (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="order of the examples (default %(default)s)")
    parser.add_argument("--platform", default="auto", help="auto, cpu, cuda or npu (default %(default)s)")
    a = parser.parse_args(argv)

    def show(s: SftStep) -> None:
        if s.step % 20 == 1:
            print(f"step {s.step:5d}  loss {s.loss:.4f}  {s.elapsed_s:6.1f} s", flush=True)

    try:
        result = train_sft(
            a.model,
            a.out,
            read_examples(a.data),
            seconds=a.seconds,
            steps=a.steps,
            batch_tokens=a.batch_tokens,
            learning_rate=a.learning_rate,
            seed=a.seed,
            platform=a.platform,
            on_step=show,
        )
    except ArealError as e:
        print(f"areal_trainers.sft: {e}", file=sys.stderr)
        return 1
    print(
        f"{result.steps} steps, loss {result.loss:.4f}, {result.tokens_per_s:.0f} tokens/s -> {result.model}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
