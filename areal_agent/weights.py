"""How weights are laid out on the wire: packed buckets, their order, and their checksum.

Sender (trainer) and receiver (engine) both import this and nothing of each other. A bucket is one flat
uint8 buffer of whole tensors, each at a 16-byte-aligned offset; it is broadcast with one collective.
This file imports no torch: `checksum` only calls methods that a torch tensor and a numpy array share.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

ALIGN = 16
"""Bytes; keeps every tensor of a bucket viewable in its own dtype, and the bucket itself in int64."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Wire dtypes. Weights are cast to one of these by the sender."""

DISK = "disk"
"""In place of a collective backend: buckets lie in a folder, one safetensors file each (`shard_name`)."""

LOCK_FILE = "lock"
"""In that folder: readers hold a shared flock(2) on it while they read, whoever removes it an exclusive one."""

IN_FLIGHT = 4
"""Buckets on the wire at once: a side that is late, for its core does something else, keeps nobody waiting."""

CHUNK = 64
"""Words of 8 bytes that a checksum adds up at a time: the finest order it can see is that of 512 bytes."""

COLUMNS = 256


class TensorSpec(BaseModel, frozen=True):
    """One tensor in a bucket: Hugging Face parameter name, wire dtype, shape, byte offset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Bucket(BaseModel, frozen=True):
    """Tensors packed into one flat uint8 buffer of `nbytes`."""

    tensors: tuple[TensorSpec, ...]
    nbytes: int


class Adapter(BaseModel, frozen=True):
    """A LoRA adapter: W of each adapted layer counts as W + alpha/rank · B·A."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]


class Manifest(BaseModel, frozen=True):
    """Every bucket of one weight update, in the order of the broadcasts.

    With `adapter` the tensors are its A and B alone, under peft's names; else all weights of the model.
    """

    buckets: tuple[Bucket, ...]
    adapter: Adapter | None = None

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.buckets)


def plan(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    bucket_bytes: int,
    adapter: Adapter | None = None,
    *,
    alone_bytes: int | None = None,
) -> Manifest:
    """Pack (name, dtype, shape) in the given order into buckets of at most `bucket_bytes`.

    A tensor of `alone_bytes` or more (None: larger than `bucket_bytes`) gets a bucket to itself. Raises
    ValueError for a dtype not on the wire.
    """
    buckets: list[Bucket] = []
    current: list[TensorSpec] = []
    end, last_alone = 0, False
    for name, dtype, shape in tensors:
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{name} has dtype {dtype}; the wire carries {', '.join(ITEM_BYTES)}")
        size = math.prod(shape) * ITEM_BYTES[dtype]
        offset = -(-end // ALIGN) * ALIGN
        alone = alone_bytes is not None and size >= alone_bytes
        if current and (alone or last_alone or offset + size > bucket_bytes):
            buckets.append(Bucket(tensors=tuple(current), nbytes=-(-end // ALIGN) * ALIGN))
            current, offset = [], 0
        current.append(TensorSpec(name=name, dtype=dtype, shape=tuple(shape), offset=offset))
        end, last_alone = offset + size, alone
    if current:
        buckets.append(Bucket(tensors=tuple(current), nbytes=-(-end // ALIGN) * ALIGN))
    return Manifest(buckets=tuple(buckets), adapter=adapter)


def shard_name(index: int, count: int) -> str:
    """File of bucket `index` in a folder of `count`, as Hugging Face calls the parts of a model."""
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def checksum(words: Any) -> str:
    """16 hex digits of a bucket viewed as int64 [N], the same on every device and byte for byte in numpy.

    A chunk's sum is exact (modulo 2^64, where order does not matter); row and column sums of the chunks'
    sums are hashed. A flipped bit shows always; a shifted bucket and blocks of 512 bytes that changed
    places show by a wrong sum. Costs one read of the buffer, and no copy of it to the host.
    """
    n = int(words.shape[0])
    whole = n // CHUNK * CHUNK
    sums = words[:whole].reshape(-1, CHUNK).sum(1)
    square = len(sums) // COLUMNS * COLUMNS
    grid = sums[:square].reshape(-1, COLUMNS)
    digest = hashlib.blake2b(str(n).encode(), digest_size=8)
    for part in (grid.sum(0), grid.sum(1), sums[square:], words[whole:]):
        digest.update(b"|" + array("q", part.tolist()).tobytes())
    return digest.hexdigest()
