"""A policy as a Hugging Face folder, tokenizer included. It appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from areal_trainers.buckets import whole

MODEL_FILES = ("config.json", "generation_config.json")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json", ".gguf", ".pt", ".pth", ".h5", ".msgpack")
"""What an export writes itself or must not carry over; every other file of the source is copied."""

KEEP = 2
"""Checkpoints of a run that are kept: the last, and one more in case a reader is at it."""


class Checkpoints:
    """A run's folders `step-N`, the last KEEP of them; `latest` links to the last. Made on every rank.

    Args:
        folder: that they go to.
        source: model folder the policy started from.
        every: versions between them; 0: none before the end.
        write: whether this rank (rank 0) writes.
    """

    def __init__(self, lm: PreTrainedModel, folder: Path, source: Path, every: int, *, write: bool) -> None:
        self._lm, self._folder, self._source, self._every, self._write = lm, folder, source, every, write
        self._version: int | None = 0
        self._kept: list[Path] = []

    @property
    def last(self) -> Path | None:
        return self._kept[-1] if self._kept else None

    @contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """The policy becomes `version` inside; where that breaks off, it is no version at all."""
        self._version = None
        yield
        self._version = version

    def step(self) -> None:
        """After a version went live: save it when it is its turn. A collective."""
        if self._every and self._version and self._version % self._every == 0:
            self.save()

    def save(self) -> None:
        """Save the policy as it is, unless that is done. A collective."""
        folder = self._folder / f"step-{self._version:06d}"
        if folder == self.last:
            return
        export(self._lm, folder, self._source, write=self._write)
        self._kept.append(folder)
        if self._write:
            point_latest(folder)
            for old in self._kept[:-KEEP]:
                shutil.rmtree(old, ignore_errors=True)
        del self._kept[:-KEEP]

    def rescue(self, *, together: bool) -> None:
        """Save what an error or a signal would lose. Never raises.

        together: every rank is known to call this; else nothing is gathered, for it could wait forever.
        """
        if self._version == 0 or (self.last and self.last.name == f"step-{self._version or 0:06d}"):
            return
        why = None
        if self._version is None:
            why = "training broke off within an optimiser step"
        elif not together:
            why = "the other ranks may not be there to give their shards"
        else:
            try:
                self.save()
            except Exception as e:  # the error that ended training is the one to report
                why = f"{type(e).__name__}: {e}"
        if why and self._write:
            print(
                f"areal_trainers: no checkpoint of the last step: {why}; the last is {self.last}", flush=True
            )


def gathered(lm: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of each parameter and persistent buffer once, tied ones under their first name.

    A collective: every rank iterates in step, and holds one whole tensor at a time.
    """
    for name, value in unique_tensors(lm):
        yield name, whole(value)


def unique_tensors(lm: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """(Hugging Face name, possibly sharded tensor), tied tensors once.

    Tied names are dropped as the model declares them (`lm_head.weight` for tied embeddings), because
    after sharding an engine has no other way to know which of two equal names it should load.
    """
    seen: set[int] = set()
    persistent = set(lm.state_dict().keys())
    out = []
    for name, value in [*lm.named_parameters(), *lm.named_buffers()]:
        if name in persistent and id(value) not in seen:
            seen.add(id(value))
            out.append((name, value.detach()))
    return out


def export(lm: PreTrainedModel, folder: Path, source: Path, *, write: bool) -> Path:
    """Write `lm` to `folder`, with the tokenizer files of the model folder `source`.

    A collective: every rank calls it, the one with `write` (rank 0) writes, to a temporary folder that is
    then renamed. An existing `folder` is replaced.
    """
    state = {}
    for name, tensor in gathered(lm):
        if write:
            state[name] = tensor.cpu().contiguous()
    if not write:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        lm.save_pretrained(temporary, state_dict=state)
        for file in sorted(source.iterdir()):
            if file.is_file() and file.name not in MODEL_FILES and not file.name.endswith(WEIGHT_SUFFIXES):
                shutil.copy2(file, temporary / file.name)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def point_latest(folder: Path) -> None:
    """Make the symbolic link `latest` beside `folder` name it; a reader sees the old or the new one."""
    link = folder.with_name("latest")
    temporary = folder.with_name(f".latest.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.name)
    temporary.replace(link)
