"""A policy as a Hugging Face folder, tokenizer included. It appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from areal_agent.rundir import version_of
from areal_trainers.buckets import Computed, whole
from areal_trainers.lora import adapter_tensors, describe, merged, write_adapter_config
from areal_trainers.state import TrainingState

MODEL_FILES = ("config.json", "generation_config.json")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json", ".gguf", ".pt", ".pth", ".h5", ".msgpack")
"""What an export writes itself or must not carry over; every other file of the source is copied."""
ADAPTER_FOLDER = "adapter"
"""In an export, the LoRA adapter that is merged in it, in peft's format."""


class Checkpoints:
    """A run's checkpoints: Hugging Face folders `step-N`, with `latest`, and beside them training states.

    Made, and each method called, on every rank.

    Args:
        state: what a resumed run loads; written in the background.
        folder: that the Hugging Face folders go to.
        source: model folder the policy started from.
        every: versions between them; 0: none before the end.
        keep: newest ones kept, of both kinds.
        write: whether this rank (rank 0) writes.
        version: of the policy as it is now.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        state: TrainingState,
        folder: Path,
        source: Path,
        every: int,
        keep: int,
        *,
        write: bool,
        version: int = 0,
    ) -> None:
        self._lm, self._state, self._folder, self._source = lm, state, folder, source
        self._every, self._keep, self._write = every, keep, write
        self._version: int | None = version
        self._start = version
        self._kept = sorted(folder.glob("step-*"), key=version_of)
        self._kept = [f for f in self._kept if version_of(f) <= version]
        """Those a resumed run had after its state are made again."""

    @property
    def last(self) -> Path | None:
        return self._kept[-1] if self._kept else None

    @contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """The policy becomes `version` inside; where that breaks off, it is no version at all."""
        self._version = None
        yield
        self._version = version

    def step(self, extra: Mapping[str, Any]) -> None:
        """After a version went live and its batch was acked: save it when it is its turn."""
        if self._every and self._version and self._version % self._every == 0:
            self.save(extra)

    def save(self, extra: Mapping[str, Any] | None) -> None:
        """Save the policy as it is, unless that is done; without `extra`, no state to resume from."""
        if self._saved:
            return
        assert self._version is not None
        if extra is not None:
            self._state.save(self._version, extra)
        folder = export(self._lm, self._named, self._source, write=self._write)
        self._kept.append(folder)
        if self._write:
            point_latest(folder)
            for old in self._kept[: -self._keep]:
                shutil.rmtree(old, ignore_errors=True)
        del self._kept[: -self._keep]

    def finish(self, extra: Mapping[str, Any]) -> None:
        """Save the last version, and wait until everything is on disk."""
        self.save(extra)
        self._state.wait()

    def rescue(self, extra: Mapping[str, Any] | None, *, together: bool) -> None:
        """Save what an error or a signal would lose. Never raises.

        together: every rank is known to call this; else nothing is gathered, for it could wait forever.
        """
        why = None
        if self._version is None:
            why = "training broke off within an optimiser step"
        elif not self._saved and self._version != self._start and not together:
            why = "the other ranks may not be there to give their shards"
        elif together:
            try:
                if self._version != self._start:
                    self.save(extra)
                self._state.wait()
            except Exception as e:  # the error that ended training is the one to report
                why = f"{type(e).__name__}: {e}"
        if why and self._write:
            print(
                f"areal_trainers: no checkpoint of the last step: {why}; the last is {self.last}", flush=True
            )

    @property
    def _named(self) -> Path:
        return self._folder / f"step-{self._version:06d}"

    @property
    def _saved(self) -> bool:
        return self._version is not None and self.last == self._named


def gathered(lm: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of each parameter and persistent buffer once, tied ones under their first name.

    A collective: every rank iterates in step, and holds one whole tensor at a time.
    """
    for name, value in unique_tensors(lm):
        yield name, whole(value)


def unique_tensors(lm: nn.Module) -> list[tuple[str, torch.Tensor | Computed]]:
    """(Hugging Face name, possibly sharded tensor), tied tensors once, a LoRA adapter merged.

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
    return [*merged(lm, out)]


def export(lm: PreTrainedModel, folder: Path, source: Path, *, write: bool) -> Path:
    """Write `lm` to `folder`, with the tokenizer files of the model folder `source`. A LoRA adapter is merged,
    and written to `folder`/adapter by itself as well.

    A collective: every rank calls it, the one with `write` (rank 0) writes, to a temporary folder that is
    then renamed. An existing `folder` is replaced.
    """
    state = {}
    for name, tensor in gathered(lm):
        if write:
            state[name] = tensor.cpu().contiguous()
    adapter, adapter_state = describe(lm), {}
    for name, tensor in adapter_tensors(lm):
        tensor = whole(tensor)
        if write:
            adapter_state[name] = tensor.cpu().contiguous()
    if not write:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        lm.save_pretrained(temporary, state_dict=state)
        for file in sorted(source.iterdir()):
            if file.is_file() and file.name not in MODEL_FILES and not file.name.endswith(WEIGHT_SUFFIXES):
                shutil.copy2(file, temporary / file.name)
        if adapter is not None:
            (temporary / ADAPTER_FOLDER).mkdir()
            save_file(adapter_state, temporary / ADAPTER_FOLDER / "adapter_model.safetensors")
            write_adapter_config(temporary / ADAPTER_FOLDER, adapter, str(source))
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
