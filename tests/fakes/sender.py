"""A trainer's rank 0 as the weight transaction sees it: one store, a group per epoch, packed broadcasts.

    sender = Sender()
    result = await sender.push(fleet.weights, version, tensors)      # begin, send, commit

The steps are there one by one (`begin`, `send`, `commit`) for tests that stop in between. Blocking
collectives run in threads, as they do in a trainer, where nothing else runs beside them.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from areal_agent.weights import Adapter, Manifest, checksum, plan
from areal_gateway.fleet import WeightTransaction

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def pack(
    tensors: dict[str, torch.Tensor], bucket_bytes: int = 1 << 20, adapter: Adapter | None = None
) -> tuple[Manifest, list[torch.Tensor]]:
    """(manifest, one flat uint8 tensor per bucket)."""
    manifest = plan([(n, NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()], bucket_bytes, adapter)
    buckets = []
    for bucket in manifest.buckets:
        flat = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        for spec in bucket.tensors:
            raw = tensors[spec.name].detach().contiguous().view(-1).view(torch.uint8)
            flat[spec.offset : spec.offset + spec.nbytes] = raw
        buckets.append(flat)
    return manifest, buckets


def checksums(buckets: list[torch.Tensor]) -> list[str]:
    return [checksum(b.view(torch.int64)) for b in buckets]


class Sender:
    """See the module's docstring. `timeout_s` bounds every collective."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.timeout = timedelta(seconds=timeout_s)
        self.host = "127.0.0.1"
        self._store = TCPStore(self.host, 0, None, True, self.timeout, wait_for_workers=False)
        self.group: Any = None

    @property
    def store(self) -> dict[str, Any]:
        return {"host": self.host, "port": self._store.port}

    def join(self, epoch: int, world_size: int) -> None:
        """Make the epoch's group as rank 0; blocks until every engine joined."""
        self.leave()
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = self.timeout
        store = PrefixStore(f"areal/{epoch}", self._store)
        self.group = dist.ProcessGroupGloo(store, 0, world_size, options)

    def broadcast(self, buckets: list[torch.Tensor]) -> None:
        for bucket in buckets:
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            options.timeout = self.timeout
            self.group.broadcast([bucket], options).wait()

    def leave(self) -> None:
        """Drop the group, as the process's death would."""
        group, self.group = self.group, None
        if group is not None:
            group.abort()

    async def begin(
        self, weights: WeightTransaction, version: int, manifest: Manifest, *, force: bool = False
    ) -> dict[str, Any]:
        return await weights.begin(
            version=version, manifest=manifest, store=self.store, backend="gloo", force=force
        )

    async def send(self, begun: dict[str, Any], buckets: list[torch.Tensor]) -> None:
        if begun["join"]:
            await asyncio.to_thread(self.join, begun["epoch"], begun["world_size"])
        await asyncio.to_thread(self.broadcast, buckets)

    async def push(
        self,
        weights: WeightTransaction,
        version: int,
        tensors: dict[str, torch.Tensor],
        *,
        force: bool = False,
        bucket_bytes: int = 1 << 20,
        adapter: Adapter | None = None,
    ) -> dict[str, Any]:
        """One whole update."""
        manifest, buckets = pack(tensors, bucket_bytes, adapter)
        begun = await self.begin(weights, version, manifest, force=force)
        await self.send(begun, buckets)
        return await weights.commit(begun["update_id"], checksums(buckets))
