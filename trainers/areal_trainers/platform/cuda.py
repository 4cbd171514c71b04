"""NVIDIA (and ROCm) devices with NCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store


class CudaPlatform:
    name = "cuda"
    backend = "nccl"
    visible_devices_env: str | None = "CUDA_VISIBLE_DEVICES"
    default_dtype = torch.bfloat16
    widest_float = torch.float64
    bucket_mib = 32.0
    attention = "flash"
    own_memory = True

    def available(self) -> bool:
        return torch.cuda.is_available()

    def missing(self) -> str:
        return (
            f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; "
            "install a CUDA build of torch and check the driver and CUDA_VISIBLE_DEVICES"
        )

    def device(self, local_rank: int) -> torch.device:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def memory(self) -> tuple[int, int]:
        return torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1]

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)

    def process_group(self, store: Store, rank: int, size: int, timeout: timedelta, *, loopback: bool) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
