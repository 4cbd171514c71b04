"""The protocol of a device family: all that the trainer asks of its hardware, and nothing more."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Store


class Platform(Protocol):
    """One device family.

    Attributes:
        name: cpu, cuda or npu; also torch's device type.
        backend: collective backend of the trainer's own ranks and of weight broadcasts.
        visible_devices_env: environment variable that restricts which devices a process sees.
        default_dtype: compute dtype that suits the hardware (master weights are float32 everywhere).
        widest_float: widest floating-point dtype its collectives add in.
        bucket_mib: MiB of weights that are best broadcast at once.
        attention: a name of attention.KERNELS, taken where it can compute in the run's dtype.
        own_memory: whether its memory is apart from the host's, so that offloading to the host frees some.
    """

    name: str
    backend: str
    visible_devices_env: str | None
    default_dtype: torch.dtype
    widest_float: torch.dtype
    bucket_mib: float
    attention: str
    own_memory: bool

    def available(self) -> bool:
        """Whether a device of this family can be used in this process."""
        ...

    def missing(self) -> str:
        """Why it is not available, and what would make it so."""
        ...

    def device(self, local_rank: int) -> torch.device:
        """Select and return the device of a local rank."""
        ...

    def memory(self) -> tuple[int, int]:
        """(peak bytes used by this process since `reset_peak`, bytes the device has in all)."""
        ...

    def reset_peak(self) -> None: ...

    def empty_cache(self) -> None: ...

    def synchronize(self) -> None: ...

    def rng_state(self) -> torch.Tensor: ...

    def set_rng_state(self, state: torch.Tensor) -> None: ...

    def process_group(self, store: Store, rank: int, size: int, timeout: timedelta, *, loopback: bool) -> Any:
        """A collective group of its own over `store`, outside torch's default group.

        Blocks until all `size` members have connected or `timeout` is over (RuntimeError).
        `loopback` binds it to 127.0.0.1 where the backend lets one choose.
        """
        ...
