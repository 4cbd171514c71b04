"""Packing: the bytes are right, and no more of the model is whole at once than the buckets in flight and a tensor."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from trainer_kit import make_model

from areal_agent.weights import IN_FLIGHT
from areal_trainers.buckets import DTYPES, Packer, whole


def unpack(packer: Packer) -> dict[str, torch.Tensor]:
    got = {}
    for i, bucket in enumerate(packer.manifest.buckets):
        flat = packer.pack(i)
        assert flat.numel() == bucket.nbytes
        for spec in bucket.tensors:
            raw = flat[spec.offset : spec.offset + spec.nbytes].clone()
            got[spec.name] = raw.view(DTYPES[spec.dtype]).view(spec.shape)
    return got


TENSORS = {
    "a": torch.randn(7, 5),
    "large": torch.randn(40, 30),  # more than a bucket
    "view": torch.randn(6, 9).t(),  # not contiguous
    "scalar": torch.tensor(3.0),
    "half": torch.randn(11).to(torch.bfloat16),
}


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("limit", [16, 512, 1 << 20])
def test_buckets_hold_every_tensor_in_the_wire_dtype(dtype: str, limit: int) -> None:
    got = unpack(Packer(TENSORS, dtype, limit, keep=True))
    assert list(got) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(got[name], tensor.to(DTYPES[dtype]).view(tensor.shape)), name


def test_a_bucket_stays_as_it_is_while_the_next_one_is_packed() -> None:
    """It is on the wire then."""
    packer = Packer({f"t{i}": torch.full((8,), float(i)) for i in range(6)}, "bfloat16", 16, keep=True)
    before = packer.pack(0)
    for i in range(1, 6):
        kept = before.clone()
        now = packer.pack(i)
        assert torch.equal(before, kept)
        before = now


def test_a_large_tensor_that_needs_no_cast_is_not_copied() -> None:
    tensor = torch.randn(64)
    packer = Packer({"t": tensor}, "float32", 16, keep=True)
    assert packer.pack(0).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("lora", [0, 4])
def test_two_ranks_never_hold_more_than_the_buckets_in_flight_and_one_tensor(
    tmp_path: Path, lora: int
) -> None:
    """FSDP2 over two processes; rank 0 counts the memory of everything gathered or packed that is alive. With
    LoRA that is a merged tensor, and the A and B of one layer."""
    folder = make_model(tmp_path / "m")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [*torchrun, __file__, str(folder), str(lora)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0 held" in done.stdout


def _rank(folder: str, rank: int) -> None:
    from areal_agent.config import LoRAConfig
    from areal_trainers import buckets, lora
    from areal_trainers.checkpoint import unique_tensors
    from areal_trainers.model import load_causal_lm, shard
    from areal_trainers.platform import get_platform
    from areal_trainers.ranks import join_ranks

    limit, alive = 8192, weakref.WeakValueDictionary()
    most = 0

    def counted(value: torch.Tensor) -> torch.Tensor:
        nonlocal most
        gathered = whole(value)
        alive[id(gathered)] = gathered
        most = max(most, sum(t.numel() * t.element_size() for t in alive.values()))
        return gathered

    buckets.whole = lora.whole = counted
    with join_ranks(get_platform("cpu")) as ranks:
        lm = load_causal_lm(folder)
        if rank:
            lora.attach(lm, LoRAConfig(rank=rank), seed=0)
            for name, p in lm.named_parameters():
                if ".lora_B." in name:
                    p.data.fill_(0.01)
        expected = {n: whole(t).clone() for n, t in unique_tensors(lm)}
        shard(lm, ranks.mesh)
        most = 0
        tensors = dict(unique_tensors(lm))
        assert all(isinstance(t, DTensor) for t in tensors.values() if isinstance(t, torch.Tensor))
        assert sum(isinstance(t, lora.Merged) for t in tensors.values()) == (14 if rank else 0)
        packer = Packer(tensors, "bfloat16", limit, keep=ranks.first)
        low_rank = 4 * rank * max(sum(t.shape) for t in tensors.values())
        largest = max(t.shape.numel() * 4 for t in tensors.values()) + low_rank
        assert len(packer.manifest.buckets) > 4
        gc.disable()  # what is alive is held, not waiting to be collected
        if ranks.first:
            got = unpack(packer)
            assert all(torch.equal(got[n], expected[n].to(torch.bfloat16)) for n in expected)
            packed = sum(b.numel() for b in packer._buffers)
            assert most <= largest, (most, largest)
            assert packed <= IN_FLIGHT * max(limit, max(b.nbytes for b in packer.manifest.buckets))
            print("rank 0 held", most, packed)
        else:
            for i in range(len(packer.manifest.buckets)):
                assert packer.pack(i).numel() == 0


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]))
