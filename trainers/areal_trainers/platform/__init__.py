"""Where the trainer runs: `cpu`, `cuda` or `npu`, chosen once, by name or by what is there.

Everything that differs between device families is behind `Platform`; no other file branches on them.
"""

from __future__ import annotations

from collections.abc import Callable

from areal_agent.errors import ConfigError
from areal_trainers.platform.base import Platform


def _cpu() -> Platform:
    from areal_trainers.platform.cpu import CpuPlatform

    return CpuPlatform()


def _cuda() -> Platform:
    from areal_trainers.platform.cuda import CudaPlatform

    return CudaPlatform()


def _npu() -> Platform:
    from areal_trainers.platform.npu import NpuPlatform

    return NpuPlatform()


PLATFORMS: dict[str, Callable[[], Platform]] = {"npu": _npu, "cuda": _cuda, "cpu": _cpu}
"""In the order of detection: an accelerator before the CPU that hosts it."""


def get_platform(name: str = "auto") -> Platform:
    """The platform called `name`; "auto" takes the first that has a device.

    Raises ConfigError when it is unknown or has no device here.
    """
    if name == "auto":
        return next(p for make in PLATFORMS.values() if (p := make()).available())
    if name not in PLATFORMS:
        raise ConfigError(f"no platform is called {name!r}; there are {', '.join(PLATFORMS)} and auto")
    platform = PLATFORMS[name]()
    if not platform.available():
        raise ConfigError(f"platform {name} has no usable device here: {platform.missing()}")
    return platform


def check_offload(wanted: bool, platform: Platform) -> None:
    """Raise ConfigError where `trainer.cpu_offload` is wanted and the platform's memory is the host's."""
    if wanted and not platform.own_memory:
        raise ConfigError(
            f"trainer.cpu_offload = true, but on platform {platform.name} weights and optimiser state are in host "
            "memory as it is, so it would free nothing; set it to false"
        )


__all__ = ["PLATFORMS", "Platform", "check_offload", "get_platform"]
