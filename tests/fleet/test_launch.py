"""Starting engine processes: command lines, memory, last words, and the fake engine run as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from fleet_kit import Harness, fake_command, run_config

from areal_agent.config import FleetConfig
from areal_agent.errors import ConfigError, EngineError
from areal_gateway.fleet import EngineSampling, Fleet
from areal_gateway.fleet.process import (
    LaunchSpec,
    cpu_threads,
    engine_args,
    last_words,
)

SPEC = LaunchSpec(
    model="/models/m",
    port=1234,
    index=0,
    engines=2,
    platform="cpu",
    trainer_ranks=1,
    fleet=FleetConfig(max_model_len=512, extra_args=["--block-size", "32"]),
    seed=7,
)


def option(command: list[str], name: str) -> str:
    assert command.count(name) == 1, (name, command)
    return command[command.index(name) + 1]


# --- command lines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["cpu", "cuda", "npu"])
def test_every_platform_gets_what_the_gateway_relies_on(platform: str) -> None:
    args = engine_args(replace(SPEC, platform=platform))
    assert option(args.command, "--host") == "127.0.0.1"
    assert option(args.command, "--logprobs-mode") == "processed_logprobs"
    assert option(args.command, "--worker-extension-cls").endswith(".AREALWorkerExtension")
    assert option(args.command, "--max-model-len") == "512"
    assert option(args.command, "--stream-interval") == "8"
    assert "--enable-scale-out" in args.command
    assert "--enable-prefix-caching" in args.command
    assert option(args.command, "--seed") == "7"
    assert args.command[-2:] == ["--block-size", "32"]
    assert args.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert args.env["HF_HUB_OFFLINE"] == "1"


def test_a_cpu_engine_is_eager_and_exact() -> None:
    args = engine_args(SPEC)
    assert "--enforce-eager" in args.command
    assert option(args.command, "--dtype") == "float32"
    assert option(args.command, "--kv-cache-memory-bytes") == str(2**30)
    assert option(args.command, "--distributed-executor-backend") == "uni"
    several = engine_args(replace(SPEC, fleet=FleetConfig(tensor_parallel=2)))
    assert "--distributed-executor-backend" not in several.command


def test_an_npu_engine_keeps_weights_in_the_layout_they_are_loaded_in() -> None:
    args = engine_args(replace(SPEC, platform="npu"))
    assert json.loads(option(args.command, "--additional-config")) == {"weight_nz_mode": 0}


def test_engines_on_accelerators_get_devices_after_the_trainers(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    fleet = FleetConfig(tensor_parallel=1)
    devices = [
        engine_args(replace(SPEC, platform="cuda", index=i, fleet=fleet)).env.get("CUDA_VISIBLE_DEVICES")
        for i in range(4)
    ]
    assert devices == ["5", "6", "7", None]


def test_thread_settings_of_the_environment_win(monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    assert cpu_threads(SPEC)["OMP_NUM_THREADS"] == "4"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert cpu_threads(replace(SPEC, engines=1))["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert cpu_threads(SPEC)["OMP_NUM_THREADS"] == "3"


# --- what fits -------------------------------------------------------------------------------------------


async def test_a_folder_that_is_no_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """By the same check, in the same words, as before the whole run starts."""
    h = fleet_of(tmp_path, 1)
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer"):
        await h.fleet.start()
    assert h.fleet.members == []


# --- last words ------------------------------------------------------------------------------------------

LOG = """\
INFO 11-29 19:00:01 [api_server.py:1] vLLM API server version 0.32.0
(EngineCore pid=12) ERROR 11-29 19:00:02 [core.py:866] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-29 19:00:02 [core.py:866]   File "core.py", line 1, in run
(EngineCore pid=12) ERROR 11-29 19:00:02 [core.py:866] ValueError: No available memory for the cache blocks
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_last_words_are_the_root_cause() -> None:
    assert last_words(LOG.splitlines()) == "ValueError: No available memory for the cache blocks"
    pydantic = [
        "x.ValidationError: 1 validation error for VllmConfig",
        "  Value error, no such device [type=x]",
    ]
    assert last_words(pydantic) == " | ".join(line.strip() for line in pydantic)
    assert last_words(["a", "b", "c", "d"]) == "b | c | d"
    assert last_words([]) == "its log is empty"


# --- processes -------------------------------------------------------------------------------------------


def fleet_of(tmp_path: Path, n: int, *args: str, **fleet) -> Harness:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    config = run_config(fleet={"engines": n, "memory_gib": 0.1, **fleet})
    config.model = str(model)
    events: list[dict] = []
    return Harness(Fleet(config, tmp_path, events.append, command=fake_command(*args)), [], events)


async def tokens(h: Harness, n: int = 20) -> list:
    sampling = EngineSampling(max_tokens=n, temperature=0.0)
    return [c async for c in h.fleet.generate(session_id="s", prompt_ids=[1], sampling=sampling)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_engines_start_serve_and_leave_nothing_behind(tmp_path: Path) -> None:
    h = fleet_of(tmp_path, 2)
    await h.fleet.start()
    try:
        assert h.states() == ["serving", "serving"]
        pids = [e["pid"] for e in h.fleet.status()["engines"]]
        assert all(alive(pid) for pid in pids)
        assert (await tokens(h))[-1].finish_reason == "length"
        assert {p.name for p in (tmp_path / "logs").iterdir()} == {"engine-0.log", "engine-1.log"}
    finally:
        await h.fleet.stop()
    assert not any(alive(pid) for pid in pids)
    await h.fleet.stop()  # idempotent


async def test_an_engine_that_dies_while_starting_is_explained_and_leaves_nothing(tmp_path: Path) -> None:
    h = fleet_of(tmp_path, 2, "--crash", "ValueError: No available memory for the cache blocks")
    with pytest.raises(EngineError) as caught:
        await h.fleet.start()
    text = str(caught.value)
    assert "did not start" in text
    assert "ValueError: No available memory" in text
    assert "engine-" in text
    assert all(e["pid"] is None for e in h.fleet.status()["engines"])


async def test_no_two_engines_and_no_two_starts_sample_from_the_same_seed(tmp_path: Path) -> None:
    seeds: list[int] = []

    def command(spec: LaunchSpec):
        seeds.append(spec.seed)
        return fake_command()(spec)

    h = fleet_of(tmp_path, 2)
    h.fleet._command = command
    await h.fleet.start()
    try:
        os.kill(h.fleet.status()["engines"][0]["pid"], signal.SIGKILL)
        await h.until(lambda: len(seeds) == 3, 15)
    finally:
        await h.fleet.stop()
    assert len(set(seeds)) == 3


async def test_a_taken_port_is_tried_again_with_another(tmp_path: Path) -> None:
    model_command = fake_command()
    ports: list[int] = []
    with_clash = fake_command("--crash", "OSError: [Errno 98] error while attempting: address already in use")

    def command(spec: LaunchSpec):
        ports.append(spec.port)
        return (with_clash if len(ports) == 1 else model_command)(spec)

    h = fleet_of(tmp_path, 1)
    h.fleet._command = command
    await h.fleet.start()
    await h.fleet.stop()
    assert len(set(ports)) == 2


async def test_a_killed_engine_is_started_again_and_serves_again(tmp_path: Path) -> None:
    h = fleet_of(tmp_path, 1)
    await h.fleet.start()
    try:
        first = h.fleet.status()["engines"][0]["pid"]
        os.kill(first, signal.SIGKILL)
        await h.until(lambda: h.states() == ["gone"], 5)
        call = asyncio.create_task(tokens(h))  # waits for the restart
        await h.until(lambda: h.states() == ["serving"], 15)
        assert (await call)[-1].spans == [(0, 20, 0)]
        engine = h.fleet.status()["engines"][0]
        assert engine["restarts"] == 1
        assert engine["pid"] != first
    finally:
        await h.fleet.stop()


async def test_stop_during_start_ends_what_was_started(tmp_path: Path) -> None:
    h = fleet_of(tmp_path, 1, "--faults", json.dumps({"http": {"/health": "hang"}}))
    start = asyncio.create_task(h.fleet.start())
    await h.until(lambda: h.fleet.status()["engines"] and h.fleet.status()["engines"][0]["pid"], 10)
    pid = h.fleet.status()["engines"][0]["pid"]
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not alive(pid)
