"""What is measured: the canned engine alone, this gateway before it, and the peers, each as its own process.

Peers are installed from PyPI into environments of their own under `.cache/peers/`, the first time.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from areal_agent.config import RunConfig
from areal_agent.rundir import RunDir

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / ".cache" / "peers"
READY_S = 120.0

Opener = Callable[[aiohttp.ClientSession], Awaitable[tuple[str, dict[str, str]]]]
"""Begins a session; gives the URL of its chat endpoint and the headers."""


@dataclass(frozen=True)
class System:
    """One thing under load."""

    name: str
    open: Opener
    run: RunDir | None = None


@contextmanager
def canned_engine(spec: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, str(HERE / "_canned_engine.py"), "--port", str(port), "--spec", str(spec)]
    with started(command, lambda: listens(port)):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def areal(folder: Path, model: Path, engine: str) -> Iterator[System]:
    """This gateway; each session has its own key."""
    run = RunDir.create(
        RunConfig.parse({"model": str(model), "run_dir": str(folder), "fleet": {"attach": [engine]}})
    )
    command = [sys.executable, "-m", "areal_agent.cli", "gateway", "--run-dir", str(folder)]
    with started(command, lambda: run.read("gateway.json") is not None):
        url = (run.read("gateway.json") or {})["url"]
        admin = {"authorization": f"Bearer {run.admin_key()}"}

        async def opened(http: aiohttp.ClientSession) -> tuple[str, dict[str, str]]:
            asked = {"task_id": "bench", "purpose": "rollout"}
            async with http.post(f"{url}/admin/sessions", json=asked, headers=admin) as answer:
                key = (await answer.json())["api_key"]
            return f"{url}/v1/chat/completions", {"authorization": f"Bearer {key}"}

        yield System("areal_agent", opened, run)


def bare(engine: str) -> System:
    """The engine, asked in text as the peers ask it."""

    async def opened(_: aiohttp.ClientSession) -> tuple[str, dict[str, str]]:
        return f"{engine}/v1/chat/completions", {}

    return System("engine", opened)


@contextmanager
def rllm(folder: Path, engine: str) -> Iterator[System]:
    """rllm-model-gateway with its SQLite store."""
    python, port = peer("rllm-model-gateway"), free_port()
    command = [str(python), "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker", engine, "--store", "sqlite", "--db-path", str(folder / "rllm.sqlite")]
    numbers = itertools.count()
    with started([*command, "--log-level", "warning"], lambda: listens(port)):

        async def opened(_: aiohttp.ClientSession) -> tuple[str, dict[str, str]]:
            return f"http://127.0.0.1:{port}/sessions/s{next(numbers)}/v1/chat/completions", {}

        yield System("rllm-model-gateway", opened)


@contextmanager
def agentlightning(folder: Path, engine: str) -> Iterator[System]:
    """agent-lightning's LLM proxy with its in-memory store."""
    python, port, paths = peer("agentlightning"), free_port(), folder / "rollouts.json"
    command = [str(python), str(HERE / "_peer_agentlightning.py"), str(port), engine, str(paths)]
    with started(command, lambda: paths.exists() and paths.stat().st_size > 0):
        known = itertools.cycle(json.loads(paths.read_text()))

        async def opened(_: aiohttp.ClientSession) -> tuple[str, dict[str, str]]:
            return f"http://127.0.0.1:{port}{next(known)}/v1/chat/completions", {}

        yield System("agentlightning", opened)


def peer(package: str) -> Path:
    """The Python of a peer's own environment."""
    folder = PEERS / package
    python = folder / "bin" / "python"
    done = folder / ".installed"
    if not done.exists():
        print(f"installing {package} into {folder.relative_to(HERE.parent)}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", package], check=True
        )
        done.touch()
    return python


@contextmanager
def started(command: list[str], ready: Callable[[], bool]) -> Iterator[None]:
    ours = command[0] == sys.executable
    env = {k: v for k, v in os.environ.items() if ours or k != "PYTHONPATH"}
    env["LITELLM_LOG"] = "ERROR"
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None if ours else subprocess.DEVNULL,
        env=env,
    )
    try:
        end = time.monotonic() + READY_S
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"not ready (code {process.poll()}): {' '.join(map(str, command))}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


async def metrics(run: RunDir) -> dict[str, float]:
    """The gateway's /metrics as name{labels} -> value."""
    info: dict[str, Any] = run.read("gateway.json") or {}
    headers = {"authorization": f"Bearer {run.admin_key()}"}
    async with aiohttp.ClientSession() as http, http.get(f"{info['url']}/metrics", headers=headers) as answer:
        lines = (await answer.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def resident_mib(run: RunDir) -> float:
    """Resident memory of the gateway's process."""
    pid = (run.read("gateway.json") or {})["pid"]
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
