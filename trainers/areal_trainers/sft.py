"""Supervised fine-tuning on the trainer's own engine: packed, sharded, resumable, loss where the mask says.

The loss is the mean negative logprob over the predicted tokens of a whole step, so that micro-batches and ranks
are invisible. Killed and resumed, it ends with the weights of a run never killed, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from areal_agent.config import RunConfig, TrainerConfig
from areal_agent.errors import ArealError, ConfigError
from areal_agent.rundir import newest_state
from areal_agent.settings import yaml_value
from areal_trainers import checkpoint
from areal_trainers.evaluate import micro_batches
from areal_trainers.model import Policy, load_causal_lm, shard
from areal_trainers.optim import Optimizer
from areal_trainers.packing import Item
from areal_trainers.platform import check_offload, get_platform
from areal_trainers.ranks import Ranks, join_ranks
from areal_trainers.state import TrainingState

RECENT = 10
"""Steps that a result's loss is the mean of."""


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
    settings: TrainerConfig,
    *,
    batch_tokens: int = 4096,
    decay: bool = False,
    seconds: float | None = None,
    state_dir: str | Path | None = None,
    resume: bool = False,
    on_step: Callable[[SftStep], bool | None] | None = None,
) -> SftResult:
    """Train the model in `model_dir` and write it, tokenizer included, to `out_dir`. Called on every rank.

    Args:
        examples: (token_ids [L], loss_mask [L]) pairs; a token is predicted where its mask is set.
        settings: as of `trainer` in a run's config; what concerns leases, minibatches and ranks has no use here
            (torchrun says how many ranks there are).
        batch_tokens: tokens (prompts included) in one optimiser step, over all ranks.
        decay: beside the schedule, lower the peak of the learning rate linearly to a tenth over the steps.
        seconds: stop after so much training even if `settings.steps` are not done.
        state_dir: folder of training states, one every `settings.checkpoint_every` steps and one at the end;
            None: none are kept.
        resume: go on from the newest state in `state_dir`, or begin where there is none.
        on_step: called on rank 0 after each step; returning True stops early.

    Raises ConfigError for a model, an example or a state that cannot be used.
    """
    items = [_item(i, ids, mask) for i, (ids, mask) in enumerate(examples)]
    if not items:
        raise ConfigError("train_sft got no examples")
    if settings.lora.rank:
        raise ConfigError(
            f"trainer.lora.rank = {settings.lora.rank}: supervised training trains all weights; set it to 0"
        )
    folder = Path(state_dir) if state_dir is not None else None
    if resume and folder is None:
        raise ConfigError("there is nothing to resume from without a folder of states")
    if not resume and folder is not None and (newest := newest_state(folder)):
        raise ConfigError(f"there is a training state already, {newest}; resume from it, or remove it first")
    torch.manual_seed(settings.seed)
    platform = get_platform(settings.platform)
    check_offload(settings.cpu_offload, platform)
    with join_ranks(platform, settings.sequence_parallel) as ranks:
        lm = load_causal_lm(model_dir)
        policy = shard(
            lm,
            ranks.mesh,
            getattr(torch, settings.compute_dtype),
            kernel=platform.attention,
            sequence=ranks.sequence,
            activation_checkpointing=settings.activation_checkpointing,
            cpu_offload=settings.cpu_offload,
        )
        optimizer = Optimizer.of(settings, policy.parameters())
        states = TrainingState(
            {"policy": (lm, optimizer)}, ranks, platform, folder, settings.keep_checkpoints
        )
        progress = _Progress(_fingerprint(items, batch_tokens, settings.seed))
        if resume:
            progress.resume(states.load(), folder)
        start = time.monotonic() - progress.elapsed_s
        for indices in islice(_batches(items, batch_tokens, settings.seed), progress.steps, settings.steps):
            # Ranks must agree when to stop, and their clocks do not: rank 0's counts.
            late = ranks.first and seconds is not None and time.monotonic() - start >= seconds
            if ranks.max([float(late)])[0]:
                break
            chosen = [items[i] for i in indices]
            if decay:
                optimizer.peak = settings.learning_rate * (1.0 - 0.9 * (progress.steps / settings.steps))
            loss = _loss_and_gradient(
                policy, ranks, chosen, settings.microbatch_tokens, settings.share_prefixes
            )
            norm = optimizer.step()
            report = progress.step(loss, norm, chosen, time.monotonic() - start)
            if folder is not None and progress.due(settings):
                states.save(progress.steps, progress.extra)
            stop = bool(on_step(report)) if ranks.first and on_step else False
            if ranks.max([float(stop)])[0]:
                break
        if folder is not None:
            states.save(progress.steps, progress.extra)
            states.wait()
        states.close()
        out = checkpoint.export(lm, Path(out_dir), Path(model_dir), write=ranks.first)
    recent = progress.recent
    return SftResult(
        model=out,
        steps=progress.steps,
        loss=sum(recent) / len(recent) if recent else math.nan,
        tokens=progress.tokens,
        tokens_per_s=progress.tokens / progress.elapsed_s if progress.elapsed_s else 0.0,
        wall_s=progress.elapsed_s,
    )


class _Progress:
    """How far training is, and what of it a state keeps: enough to go on with the same batches."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint, self.steps, self.tokens, self.elapsed_s = fingerprint, 0, 0, 0.0
        self.recent: list[float] = []

    @property
    def extra(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("fingerprint", "tokens", "elapsed_s", "recent")}

    def resume(self, saved: dict[str, Any] | None, folder: Path | None) -> None:
        """Take on what `TrainingState.load` found. Raises ConfigError when it is of other data."""
        if saved is None:
            return
        if saved["extra"].get("fingerprint") != self.fingerprint:
            raise ConfigError(
                f"the training state in {folder} is of other examples, another batch_tokens or another seed; "
                "give those it was started with, or another folder"
            )
        self.steps = saved["version"]
        for name, value in saved["extra"].items():
            setattr(self, name, value)

    def step(self, loss: float, grad_norm: float, chosen: list[Item], elapsed_s: float) -> SftStep:
        """Count one optimiser step on the examples `chosen`."""
        tokens = sum(map(len, chosen))
        self.steps += 1
        self.tokens += tokens
        self.elapsed_s = elapsed_s
        self.recent = [*self.recent, loss][-RECENT:]
        predicted = sum(i.predicted for i in chosen)
        return SftStep(self.steps, loss, grad_norm, tokens, predicted, elapsed_s)

    def due(self, settings: TrainerConfig) -> bool:
        """Whether a state is to be saved now; the one at the end is not counted here."""
        every = settings.checkpoint_every
        return bool(every) and self.steps % every == 0 and self.steps < settings.steps


def _loss_and_gradient(
    policy: Policy, ranks: Ranks, items: list[Item], budget: int, share_prefixes: bool
) -> float:
    """Mean loss over all predicted tokens of the step; leaves its gradient in the parameters."""
    total = sum(i.predicted for i in items)
    loss_sum = 0.0
    for micro in micro_batches(items, ranks, budget, share_prefixes):
        logprobs, _ = policy(micro)
        loss = -logprobs.sum()
        # FSDP averages gradients over ranks; the loss is a sum over them.
        (loss * (ranks.size / total)).backward()
        loss_sum += float(loss.detach())
    return ranks.sum([loss_sum])[0] / total


def _fingerprint(items: list[Item], batch_tokens: int, seed: int) -> str:
    """Of all that decides which examples are in which step."""
    digest = hashlib.sha256(repr((batch_tokens, seed)).encode())
    for item in items:
        digest.update(len(item).to_bytes(8, "little") + item.token_ids.tobytes() + item.loss_mask.tobytes())
    return digest.hexdigest()


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


SETTINGS = (
    "steps",
    "learning_rate",
    "warmup_steps",
    "schedule",
    "min_lr_ratio",
    "weight_decay",
    "grad_clip",
    "microbatch_tokens",
    "activation_checkpointing",
    "sequence_parallel",
    "compute_dtype",
    "checkpoint_every",
    "keep_checkpoints",
    "seed",
    "platform",
)
"""Settings of `trainer` that are options of the program too, under their own help."""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m areal_trainers.sft",
        description=(__doc__ or "").splitlines()[0],
        epilog="More ranks: torchrun --nproc-per-node N -m areal_trainers.sft ...",
    )
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="Hugging Face model folder to start from")
    add(
        "--data",
        required=True,
        type=Path,
        metavar="FILE",
        help='one {"token_ids": [...], "loss_mask": [...]} a line',
    )
    add("--out", required=True, type=Path, metavar="DIR", help="folder to write the trained model to")
    add("--state", type=Path, metavar="DIR", help="folder of training states (default: OUT.state)")
    add("--resume", action="store_true", help="go on from the newest training state, where there is one")
    add("--seconds", type=float, metavar="S", help="stop after so much training, if the steps are not done")
    add(
        "--batch-tokens",
        type=int,
        default=4096,
        metavar="N",
        help="tokens in one step, over all ranks (default: %(default)s)",
    )
    for name in SETTINGS:
        field = TrainerConfig.model_fields[name]
        default, choices = field.get_default(), get_args(field.annotation)
        said = f"{field.description} (default: {yaml_value(default)})".replace("%", "%%")
        option = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            add(option, action="store_true", default=argparse.SUPPRESS, help=said)
        else:
            shown = "|".join(choices) if choices else "N"
            add(option, metavar=shown, default=argparse.SUPPRESS, help=said)
    return parser


def main(argv: list[str] | None = None) -> int:
    a = arguments().parse_args(argv)
    given = {name: value for name, value in vars(a).items() if name in SETTINGS}
    first = os.environ.get("RANK", "0") == "0"
    given["ranks"] = os.environ.get("WORLD_SIZE", "1")

    def show(s: SftStep) -> None:
        if s.step % 20 == 1:
            print(f"step {s.step:5d}  loss {s.loss:.4f}  {s.elapsed_s:6.1f} s", flush=True)

    try:
        result = train_sft(
            a.model,
            a.out,
            read_examples(a.data),
            RunConfig.parse({"trainer": given}).trainer,
            batch_tokens=a.batch_tokens,
            seconds=a.seconds,
            state_dir=a.state or a.out.with_name(f"{a.out.name}.state"),
            resume=a.resume,
            on_step=show,
        )
    except ArealError as e:
        if first:
            print(f"areal_trainers.sft: {e}", file=sys.stderr)
        return 1
    if first:
        print(
            f"{result.steps} steps, loss {result.loss:.4f}, {result.tokens_per_s:.0f} tokens/s -> {result.model}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
