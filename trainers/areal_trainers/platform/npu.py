"""Ascend devices through torch_npu with HCCL.

torch_npu is imported when the platform is used, never before: importing it patches torch. The names used
here are torch_npu's public ones (`torch.npu.*`) and `torch_npu._C._distributed_c10d.ProcessGroupHCCL`.
"""

from __future__ import annotations

import importlib
import importlib.util
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store


class NpuPlatform:
    name = "npu"
    backend = "hccl"
    visible_devices_env: str | None = "ASCEND_RT_VISIBLE_DEVICES"
    default_dtype = torch.bfloat16
    widest_float = torch.float32
    bucket_mib = 32.0
    attention = "npu_fusion"
    own_memory = True

    @property
    def _npu(self) -> Any:
        importlib.import_module("torch_npu")
        return getattr(torch, "npu")  # noqa: B009  (torch has this attribute only once torch_npu is imported)

    def available(self) -> bool:
        return importlib.util.find_spec("torch_npu") is not None and self._npu.is_available()

    def missing(self) -> str:
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed; install the extra areal-agent[npu]"
        return "torch_npu sees no device; check the driver and ASCEND_RT_VISIBLE_DEVICES"

    def device(self, local_rank: int) -> torch.device:
        self._npu.set_device(local_rank)
        return torch.device("npu", local_rank)

    def memory(self) -> tuple[int, int]:
        return self._npu.max_memory_allocated(), self._npu.mem_get_info()[1]

    def reset_peak(self) -> None:
        self._npu.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        self._npu.empty_cache()

    def synchronize(self) -> None:
        self._npu.synchronize()

    def rng_state(self) -> torch.Tensor:
        return self._npu.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._npu.set_rng_state(state)

    def process_group(self, store: Store, rank: int, size: int, timeout: timedelta, *, loopback: bool) -> Any:
        c10d = importlib.import_module("torch_npu._C._distributed_c10d")
        options = c10d.ProcessGroupHCCL.Options()
        options._timeout = timeout
        return c10d.ProcessGroupHCCL(store, rank, size, options)
