"""The policy's weights as packed buckets, one after the other, for a broadcast or for a file.

Invariant: no more than IN_FLIGHT buckets and one whole tensor exist beside the shards. While buckets are being
sent the next is gathered into a buffer that is free; with none free it waits until the first has gone.

A tensor of half a bucket or more is a bucket of its own (`areal_agent.weights.plan`). One that needs no cast
and fills its bucket alone is handed out as it lies, without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from areal_agent.weights import IN_FLIGHT, ITEM_BYTES, Adapter, Bucket, Manifest, plan

DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}


class Computed(Protocol):
    """A tensor that is made when it is asked for, on every rank at once."""

    @property
    def shape(self) -> torch.Size: ...

    def whole(self) -> torch.Tensor: ...


class Packer:
    """Gathers, casts and packs. A collective: every rank asks for the same buckets in the same order.

    Args:
        tensors: Hugging Face name -> tensor, possibly an FSDP shard, or computed.
        dtype: wire dtype, a name of `areal_agent.weights.ITEM_BYTES`.
        bucket_bytes: most bytes in a bucket of several tensors.
        keep: whether this rank holds the packed buckets (rank 0); the others only give their shards.
        adapter: what `tensors` are, where they are no whole model.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor | Computed],
        dtype: str,
        bucket_bytes: int,
        *,
        keep: bool,
        adapter: Adapter | None = None,
    ) -> None:
        self._tensors, self._keep = tensors, keep
        self.manifest: Manifest = plan(
            [(name, dtype, tuple(t.shape)) for name, t in tensors.items()],
            bucket_bytes,
            adapter,
            alone_bytes=bucket_bytes // 2,
        )
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * IN_FLIGHT

    def pack(self, index: int) -> torch.Tensor:
        """Bucket `index` as uint8 [nbytes] (empty where not `keep`); its memory is used again by `index` + IN_FLIGHT."""
        bucket = self.manifest.buckets[index]
        flat: torch.Tensor | None = None
        end = 0
        for spec in bucket.tensors:
            tensor = whole(self._tensors[spec.name])
            if not self._keep:
                del tensor
                continue
            if (as_it_is := _alone(bucket, tensor)) is not None:
                return as_it_is
            if flat is None:
                flat = self._buffer(index % IN_FLIGHT, bucket.nbytes, tensor.device)
            flat[end : spec.offset].zero_()  # so that equal weights make equal bytes
            end = spec.offset + spec.nbytes
            place = flat[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype])
            place.view(spec.shape).copy_(tensor)
            del tensor  # before the next is gathered
        if flat is None:
            return self._buffers[index % IN_FLIGHT][:0]
        flat[end:].zero_()
        return flat

    def _buffer(self, which: int, nbytes: int, device: torch.device) -> torch.Tensor:
        if self._buffers[which].numel() < nbytes:
            self._buffers[which] = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return self._buffers[which][:nbytes]


def whole(value: torch.Tensor | Computed) -> torch.Tensor:
    """An FSDP shard's whole tensor (a collective), or the tensor itself where nothing is sharded.

    It is on the device that FSDP computes on, whatever memory the shard is kept in (trainer.cpu_offload): there
    the ranks are linked, and from there buckets are sent.
    """
    if not isinstance(value, torch.Tensor):
        return value.whole()
    if not isinstance(value, DTensor):
        return value
    if value.device.type != (device := value.device_mesh.device_type):
        value = value.to(device)
        assert isinstance(value, DTensor)
    return value.to_local() if value.device_mesh.size() == 1 else value.full_tensor()


def _alone(bucket: Bucket, tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's own memory as the bucket, where the two are the same bytes."""
    spec = bucket.tensors[0]
    same = len(bucket.tensors) == 1 and spec.nbytes == bucket.nbytes and tensor.dtype == DTYPES[spec.dtype]
    return tensor.detach().view(-1).view(torch.uint8) if same and tensor.is_contiguous() else None
