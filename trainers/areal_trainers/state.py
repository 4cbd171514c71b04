"""The training state on disk: what a killed trainer needs to go on as if it had not been killed.

Invariant: a folder `step-N` under RUN_DIR/state is whole. It is written to a temporary folder, flushed to
disk and then renamed; a crash at any moment leaves the folders before it. It is taken only when every batch
it was trained on is acked and no lease is held, so that what the gateway leased at version N or later is
exactly what it lacks (`Leases.rewind`).

A state holds, through torch.distributed.checkpoint, the trained parameters in float32, their AdamW moments,
and the random state of every rank; and in state.json the version, the optimiser's position (from which the
learning rate follows) and the counters of the run. Saved by N ranks it can be loaded by any number.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from areal_agent.errors import ConfigError, TrainerError
from areal_agent.rundir import STATE_FILE, newest_state, state_folders
from areal_trainers.optim import Optimizer
from areal_trainers.platform import Platform
from areal_trainers.ranks import Ranks

Part = tuple[nn.Module, Optimizer]
"""A model and the optimiser of those of its parameters that are trained."""


class TrainingState:
    """Saves and loads the state of `parts` under `folder`. Made, and each method called, on every rank.

    Args:
        parts: by name; the policy, and whatever else is trained beside it.
        folder: of the run's states; None to load only.
        keep: newest states kept.
    """

    def __init__(
        self, parts: Mapping[str, Part], ranks: Ranks, platform: Platform, folder: Path | None, keep: int
    ) -> None:
        self._parts, self._ranks, self._platform = parts, ranks, platform
        self._folder, self._keep = folder or Path("no folder of states"), keep
        self._pending: tuple[int, Future[Any]] | None = None
        self._thread = ThreadPoolExecutor(1, "training-state")
        # Saving goes on beside training, so its collectives need a group of their own. Files are written by
        # the CPU whatever the device.
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        self._group = group
        if ranks.first and folder is not None:
            for left in folder.glob(".step-*"):  # of a process that was killed while it wrote
                shutil.rmtree(left)
        ranks.max([0.0])  # nobody writes before that is done

    def save(self, version: int, extra: Mapping[str, Any] | None = None) -> None:
        """Copy the state and write it in the background. Waits for the one before.

        Args:
            extra: JSON values that `load` gives back.

        Raises TrainerError when the one before could not be written.
        """
        self.wait()
        temporary = self._folder / f".step-{version:06d}"
        if self._ranks.first:
            temporary.mkdir(parents=True, exist_ok=True)
        progress = {
            "version": version,
            "optimizer_steps": {name: optimizer.steps for name, (_, optimizer) in self._parts.items()},
            "ranks": self._ranks.size,
            "extra": dict(extra or {}),
        }
        written = async_save(
            self._tensors() | self._random(),
            storage_writer=FileSystemWriter(temporary),
            process_group=self._group,
        )
        assert isinstance(written, Future)
        if self._ranks.first:
            written = self._thread.submit(self._complete, written, temporary, progress)
        self._pending = version, written

    def wait(self) -> None:
        """Until the last `save` is on disk. Raises TrainerError, on every rank, when it could not be written."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        version, written = pending
        error = written.exception()
        if self._ranks.max([float(error is not None)])[0]:
            raise TrainerError(
                f"the training state of version {version} was not written: "
                f"{f'{type(error).__name__}: {error}' if error else 'another rank failed, its log says why'}; "
                f"is there room below {self._folder}? The newest whole one is "
                f"{newest_state(self._folder) or 'none'}"
            ) from error

    def close(self) -> None:
        """Let go of the thread; call `wait` before, or what is being written may stay unfinished."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def load(self, folder: Path | None = None) -> dict[str, Any] | None:
        """Take on the newest state, or that in `folder`; returns its state.json, or None when there is none.

        Raises ConfigError when it is of another model or optimiser.
        """
        folder = folder or newest_state(self._folder)
        if folder is None:
            return None
        reader = FileSystemReader(folder)
        there = reader.read_metadata().state_dict_metadata
        wanted = self._tensors()
        if unknown := sorted(wanted.keys() - there.keys()):
            raise ConfigError(
                f"{folder} has no {unknown[0]} ({len(unknown)} of {len(wanted)} tensors are missing): it is the "
                "state of another model, or of another choice of what is trained (trainer.lora)"
            )
        random = {name: value for name, value in self._random().items() if name in there}
        try:
            load(wanted | random, storage_reader=reader, process_group=self._group)
        except (RuntimeError, ValueError, CheckpointException) as e:
            raise ConfigError(f"{folder} cannot be loaded into this model: {e}") from e
        if f"random/{self._ranks.rank}/cpu" in random:  # a rank that did not exist then keeps its seed
            torch.set_rng_state(random[f"random/{self._ranks.rank}/cpu"])
            self._platform.set_rng_state(random[f"random/{self._ranks.rank}/device"])
        progress = json.loads((folder / STATE_FILE).read_text())
        for name, (_, optimizer) in self._parts.items():
            optimizer.steps = progress["optimizer_steps"][name]
        return progress

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Name -> (sharded) tensor, in place: loading fills these very tensors."""
        out: dict[str, torch.Tensor] = {}
        for part, (module, optimizer) in self._parts.items():
            for name, parameter in trained(module):
                out[f"{part}/weight/{name}"] = parameter.detach()
                for moment, value in optimizer.moments(parameter).items():
                    out[f"{part}/{moment}/{name}"] = value
        return out

    def _random(self) -> dict[str, torch.Tensor]:
        at = f"random/{self._ranks.rank}"
        return {f"{at}/cpu": torch.get_rng_state(), f"{at}/device": self._platform.rng_state().cpu()}

    def _complete(self, written: Future[Any], temporary: Path, progress: dict[str, Any]) -> None:
        """On rank 0, once every rank's files are on disk: the folder gets its name."""
        written.result()
        text = json.dumps(progress, indent=2) + "\n"
        with open(temporary / STATE_FILE, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _flush(temporary)
        folder = self._folder / temporary.name.removeprefix(".")
        if folder.exists():  # the version the run was resumed from: the two are equal
            shutil.rmtree(temporary)
        else:
            temporary.rename(folder)
        _flush(self._folder)
        for old in state_folders(self._folder)[: -self._keep]:
            shutil.rmtree(old)


def trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of what an optimiser may change, tied parameters once."""
    return ((name, p) for name, p in module.named_parameters() if p.requires_grad)


def _flush(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
