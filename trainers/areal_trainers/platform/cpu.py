"""CPU with gloo: the platform every test and the quick start run on."""

from __future__ import annotations

import os
import resource
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store


class CpuPlatform:
    name = "cpu"
    backend = "gloo"
    visible_devices_env: str | None = None
    default_dtype = torch.float32
    widest_float = torch.float64
    # Copied, summed and sent within the cache; copying 64 MiB at a time cost twice as much.
    bucket_mib = 4.0
    attention = "sdpa"
    own_memory = False

    def available(self) -> bool:
        return dist.is_available() and dist.is_gloo_available()

    def missing(self) -> str:
        return "this torch was built without gloo; install one with torch.distributed"

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> tuple[int, int]:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return peak, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def reset_peak(self) -> None:
        """The kernel keeps a process's peak for its life; there is nothing to reset."""

    def empty_cache(self) -> None:
        """The allocator returns memory by itself."""

    def synchronize(self) -> None:
        """Operators have finished when they return."""

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def process_group(self, store: Store, rank: int, size: int, timeout: timedelta, *, loopback: bool) -> Any:
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = timeout
        # Without this gloo binds whatever the host name resolves to, which need not be reachable.
        make = dist.ProcessGroupGloo.create_device
        options._devices = [
            make(hostname="127.0.0.1") if loopback else dist.ProcessGroupGloo.create_default_device()
        ]
        return dist.ProcessGroupGloo(store, rank, size, options)
