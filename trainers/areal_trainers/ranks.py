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

from areal_trainers.platform import Platform

STEP_TIMEOUT = timedelta(minutes=10)
"""Longest one rank may keep the others waiting in a collective; leasing sends signs of life instead."""


@dataclass(frozen=True)
class Ranks:
    """This process among `size` ranks, its device, the mesh FSDP shards over, and the widest float it adds in."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    wide: torch.dtype = torch.float64

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over ranks (in `wide`)."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: list[float]) -> list[float]:
        """Element-wise maximum over ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=self.wide, device=self.device)
        dist.all_reduce(tensor, op)
        return tensor.tolist()

    def sum_array(self, values: np.ndarray) -> np.ndarray:
        """Element-wise sum of float64 arrays over ranks (added in `wide`)."""
        return np.asarray(self._reduce(values.tolist(), dist.ReduceOp.SUM)) if self.size > 1 else values

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
def join_ranks(platform: Platform) -> Iterator[Ranks]:
    """Join the ranks torchrun started; in a plain process, be the only one (without opening a port)."""
    alone = "WORLD_SIZE" not in os.environ
    rank = 0 if alone else int(os.environ["RANK"])
    size = 1 if alone else int(os.environ["WORLD_SIZE"])
    device = platform.device(0 if alone else int(os.environ["LOCAL_RANK"]))
    if dist.is_initialized():
        size = dist.get_world_size()
        yield Ranks(dist.get_rank(), size, device, _mesh(platform, size), platform.widest_float)
        return
    # A single rank needs no rendezvous, so it opens no port.
    store = HashStore() if size == 1 else None
    dist.init_process_group(platform.backend, store=store, rank=rank, world_size=size, timeout=STEP_TIMEOUT)
    try:
        yield Ranks(rank, size, device, _mesh(platform, size), platform.widest_float)
    finally:
        dist.destroy_process_group()


def _mesh(platform: Platform, size: int) -> DeviceMesh:
    return init_device_mesh(platform.name, (size,), mesh_dim_names=("fsdp",))
