"""How much memory there is, and how many engines that is enough for."""

from __future__ import annotations

import os
from pathlib import Path

from areal_agent.config import RunConfig
from areal_agent.errors import ConfigError

TRAINER_GIB = 2.0
"""What the trainer, the gateway and the user's own process are counted with on a CPU machine."""


def available_gib() -> float:
    """Memory that can be had without swapping: the machine's, or the container's when that is less."""
    free = _meminfo()
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue  # no such controller, or the limit is "max"
    return max(free, 0) / 2**30


def _meminfo() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # not Linux: fall through to what POSIX offers
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan_engines(config: RunConfig, available: float | None = None) -> int:
    """How many engines to start: what was asked for, or for "auto" two where memory allows, else one.

    Args:
        available: GiB; measured when not given.

    Raises:
        ConfigError: too little memory for the engines asked for, or for even one.
    """
    asked = config.fleet.engines
    if config.fleet.attach:
        return 0 if asked == "auto" else asked
    if config.trainer.platform in ("cuda", "npu"):
        return 1 if asked == "auto" else asked  # the device's memory counts there, and the engine checks it
    free = available_gib() if available is None else available
    per_engine = config.fleet.memory_gib
    fits = int(max(0.0, free - TRAINER_GIB) / per_engine)
    wanted = 2 if asked == "auto" else asked
    if fits >= wanted:
        return wanted
    if asked == "auto" and fits >= 1:
        return fits
    fewer = f"set fleet.engines={fits}" if fits else "free some memory"
    raise ConfigError(
        f"too little memory for {max(1, wanted if asked != 'auto' else 1)} engines: each is counted with "
        f"{per_engine:g} GiB (fleet.memory_gib) and the trainer with {TRAINER_GIB:g} GiB, but only {free:.1f} GiB "
        f"is available; {fewer}, or lower fleet.kv_cache_gib and fleet.memory_gib"
    )
