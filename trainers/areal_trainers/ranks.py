"""The trainer's own ranks: one process group, and what moves between them. Nothing is pickled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from areal_agent.errors import ConfigError
from areal_trainers.platform import Platform
from areal_trainers.ulysses import SequenceGroup

STEP_TIMEOUT = timedelta(minutes=10)
"""Longest one rank may keep the others waiting in a collective; leasing sends signs of life instead."""


@dataclass(frozen=True)
class Ranks:
    """This process among `size` ranks, its device, and the mesh FSDP shards over.

    With sequence parallelism, groups of neighbouring ranks compute on the same micro-batches: `sequence` is
    this rank's group, and there are `data_size` of them, this one the `data_rank`-th. `data` holds the
    ranks at this rank's place in every group.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    sequence: SequenceGroup | None = None
    data: dist.ProcessGroup | None = None
    wide: torch.dtype = torch.float64
    """The widest float that the platform's collectives add in."""

    @property
    def data_size(self) -> int:
        return self.size // (self.sequence.size if self.sequence else 1)

    @property
    def data_rank(self) -> int:
        return self.rank // (self.sequence.size if self.sequence else 1)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over data ranks (in `wide`): what ranks of one sequence group all computed counts
        once."""
        return self._reduce(values, dist.ReduceOp.SUM, self.data)

    def max(self, values: list[float]) -> list[float]:
        """Element-wise maximum over ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(
        self, values: list[float], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None
    ) -> list[float]:
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=self.wide, device=self.device)
        dist.all_reduce(tensor, op, group)
        return tensor.tolist()

    def sum_array(self, values: np.ndarray) -> np.ndarray:
        """Element-wise sum of float64 arrays over data ranks (added in `wide`)."""
        return np.asarray(self.sum(values.tolist())) if self.size > 1 else values

    def broadcast_bytes(self, blob: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""
        if self.size == 1:
            assert blob is not None
            return blob
        size = torch.tensor([len(blob) if blob is not None else 0], dtype=torch.int64, device=self.device)
        dist.broadcast(size, 0)
        if not (n := int(size)):
            return b""
        body = torch.empty(n, dtype=torch.uint8, device=self.device)
        if self.first:
            body.copy_(torch.frombuffer(bytearray(blob or b""), dtype=torch.uint8))
        dist.broadcast(body, 0)
        return body.cpu().numpy().tobytes()


@contextmanager
def join_ranks(platform: Platform, sequence_parallel: int = 1) -> Iterator[Ranks]:
    """Join the ranks torchrun started; in a plain process, be the only one (without opening a port).

    `sequence_parallel` neighbouring ranks share every packed row; raises ConfigError where it does not
    divide the number of ranks.
    """
    alone = "WORLD_SIZE" not in os.environ
    rank = 0 if alone else int(os.environ["RANK"])
    size = 1 if alone else int(os.environ["WORLD_SIZE"])
    device = platform.device(0 if alone else int(os.environ["LOCAL_RANK"]))
    if dist.is_initialized():
        yield _ranks(platform, dist.get_rank(), dist.get_world_size(), device, sequence_parallel)
        return
    # A single rank needs no rendezvous, so it opens no port.
    store = HashStore() if size == 1 else None
    # What trainer.cpu_offload keeps in host memory is reduced there, whatever the device (the gradient norm).
    backends = ",".join(
        f"{device}:{name}" for device, name in {"cpu": "gloo", platform.name: platform.backend}.items()
    )
    dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=STEP_TIMEOUT)
    try:
        yield _ranks(platform, rank, size, device, sequence_parallel)
    finally:
        dist.destroy_process_group()


def _ranks(platform: Platform, rank: int, size: int, device: torch.device, sequence_parallel: int) -> Ranks:
    mesh = init_device_mesh(platform.name, (size,), mesh_dim_names=("fsdp",))
    if sequence_parallel == 1:
        return Ranks(rank, size, device, mesh, wide=platform.widest_float)
    if size % sequence_parallel:
        raise ConfigError(
            f"trainer.sequence_parallel = {sequence_parallel} does not divide the {size} trainer ranks; "
            "change it or trainer.ranks"
        )
    grid = init_device_mesh(
        platform.name, (size // sequence_parallel, sequence_parallel), mesh_dim_names=("data", "sequence")
    )
    sequence = SequenceGroup(grid.get_group("sequence"), rank % sequence_parallel, sequence_parallel)
    return Ranks(rank, size, device, mesh, sequence, grid.get_group("data"), platform.widest_float)
