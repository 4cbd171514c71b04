"""How an engine's process is started: its command line per platform, its port, its last words.

Invariant: what dies while starting is reported with the lines of its log that say why.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from areal_agent.config import FleetConfig
from areal_gateway.fleet.adapter import EngineAdapter

MODEL_NAME = "policy"
"""Served model name of the engines that we start; of the adapter, where they serve one."""

BASE_NAME = "base"
"""Then the name of the model under it, which no request asks for."""

EXTENSION = "areal_gateway.worker_extension.AREALWorkerExtension"

GIB = 2**30


@dataclass(frozen=True)
class LaunchSpec:
    """Everything an engine's command line depends on."""

    model: str
    port: int
    index: int
    engines: int
    platform: str
    trainer_ranks: int
    fleet: FleetConfig
    seed: int = 0
    adapter: EngineAdapter | None = None


MAX_LOGPROBS = 21
"""An agent may ask for the 20 likeliest tokens, and the sampled one is another."""


@dataclass(frozen=True)
class EngineArgs:
    """A command and what it adds to the environment."""

    command: list[str]
    env: dict[str, str]


# --- command lines ---------------------------------------------------------------------------------------


def _common(spec: LaunchSpec, dtype: str, *more: str) -> list[str]:
    f = spec.fleet
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", spec.model]
    if spec.adapter is None:
        command += ["--served-model-name", MODEL_NAME]
    else:
        command += ["--served-model-name", BASE_NAME, "--lora-modules", f"{MODEL_NAME}={spec.adapter.folder}"]
        command += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(spec.adapter.room)]
    command += ["--host", "127.0.0.1", "--port", str(spec.port)]
    command += ["--enable-scale-out", "--worker-extension-cls", EXTENSION]
    # The recorded logprob is of the distribution that was sampled from, temperature and cuts included.
    command += ["--logprobs-mode", "processed_logprobs"]
    command += ["--max-logprobs", str(MAX_LOGPROBS)]
    command += ["--stream-interval", str(f.stream_interval), "--max-num-seqs", str(f.max_num_seqs)]
    command += ["--enable-prefix-caching", "--dtype", dtype, "--disable-uvicorn-access-log"]
    command += ["--tensor-parallel-size", str(f.tensor_parallel)]
    # vLLM's default is 0 for all: engines would sample the same replies to the same prompts.
    command += ["--seed", str(spec.seed)]
    if f.max_model_len is not None:
        command += ["--max-model-len", str(f.max_model_len)]
    return [*command, *more, *f.extra_args]


COMMON_ENV = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""Dev mode opens /pause, /collective_rpc and the version label; the engine binds loopback only."""


def _cpu(spec: LaunchSpec) -> EngineArgs:
    dtype = "float32" if spec.fleet.dtype == "auto" else spec.fleet.dtype
    # VLLM_CPU_KVCACHE_SPACE says the same in whole GiB only.
    cache = ["--kv-cache-memory-bytes", str(int(spec.fleet.kv_cache_gib * GIB))]
    env = COMMON_ENV | cpu_threads(spec)
    if spec.fleet.tensor_parallel == 1:
        # One process for scheduler and worker. As two they spin waiting for one another: two engines on two
        # cores were slower (taken under changing load, so no ratio is given), and each held about 0.4 GiB more. vLLM wants the
        # worker apart so as to set its threads' environment, which is set here already; hence the variable.
        cache += ["--distributed-executor-backend", "uni"]
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return EngineArgs(_common(spec, dtype, "--enforce-eager", *cache), env)


def _cuda(spec: LaunchSpec) -> EngineArgs:
    env = COMMON_ENV | _devices(spec, "CUDA_VISIBLE_DEVICES", "/dev", r"nvidia\d+")
    return EngineArgs(_common(spec, spec.fleet.dtype), env)


def _npu(spec: LaunchSpec) -> EngineArgs:
    # In the NZ layout reloaded weights would be laid out wrongly.
    layout = ["--additional-config", json.dumps({"weight_nz_mode": 0})]
    env = COMMON_ENV | _devices(spec, "ASCEND_RT_VISIBLE_DEVICES", "/dev", r"davinci\d+")
    return EngineArgs(_common(spec, spec.fleet.dtype, *layout), env)


PLATFORMS: dict[str, Callable[[LaunchSpec], EngineArgs]] = {"cpu": _cpu, "cuda": _cuda, "npu": _npu}


def engine_args(spec: LaunchSpec) -> EngineArgs:
    return PLATFORMS[spec.platform](spec)


def cpu_threads(spec: LaunchSpec) -> dict[str, str]:
    """Thread settings of a CPU engine: an equal share of all cores but one, and no pinning.

    vLLM would pin its threads itself, every engine's to the same cores, with the trainer queueing behind
    them. The core left out runs the server and scheduler processes, which spin: two OpenMP threads on two
    cores decode 2 to 4 times slower than one. An explicit setting in the environment is left alone.
    """
    share = max(1, (len(os.sched_getaffinity(0)) - 1) // spec.engines // spec.fleet.tensor_parallel)
    ours = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(share)}
    return {name: os.environ.get(name, value) for name, value in ours.items()}


def _devices(spec: LaunchSpec, variable: str, folder: str, pattern: str) -> dict[str, str]:
    """Give each engine devices of its own after the trainer's, where there are enough."""
    if variable in os.environ:
        ids = os.environ[variable].split(",")
    else:
        names = [n for n in os.listdir(folder) if re.fullmatch(pattern, n)]
        ids = sorted((re.sub(r"\D", "", n) for n in names), key=int)
    size = spec.fleet.tensor_parallel
    first = spec.trainer_ranks + spec.index * size
    if first + size <= len(ids):
        return {variable: ",".join(ids[first : first + size])}
    return {}


def free_port() -> int:
    """A loopback port nobody listens on now; somebody may take it before the engine does."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# --- last words ------------------------------------------------------------------------------------------

_PREFIX = re.compile(r"^\(\S+ pid=\d+\)\s*|^(ERROR|INFO|WARNING|CRITICAL) \d\d-\d\d [\d:]+ (\[\S+\] ?)?")
_SAYS_WHY = re.compile(
    r"^\s*([\w.]*(Error|Exception|Interrupt)\b: .+|.*\berror: .+|.*Address already in use.*)"
)
_SAYS_NOTHING = re.compile(r"Engine core initialization failed|See root cause above")


def last_words(lines: Iterable[str]) -> str:
    """The lines of an engine's log that say why it died, most telling first; else its last three."""
    bare: list[str] = []
    for line in lines:
        while (shorter := _PREFIX.sub("", line)) != line:
            line = shorter
        bare.append(line.rstrip())
    why = [s.strip() for s in bare if _SAYS_WHY.match(s) and not _SAYS_NOTHING.search(s)]
    for i, s in enumerate(bare[:-1]):  # pydantic tells the reason in the line after
        if "validation error" in s:
            why.append(bare[i + 1].strip())
    chosen = list(dict.fromkeys(why))[:3] or [s for s in bare if s.strip()][-3:]
    return " | ".join(s[:500] for s in chosen) or "its log is empty"


def port_clash(lines: Iterable[str]) -> bool:
    """Whether an engine died because its port was taken."""
    return any("ddress already in use" in line for line in lines)
