"""Platforms: chosen by name or by what is there; the NPU's code runs on a module that fakes torch_npu."""

from __future__ import annotations

import importlib.util
import sys
import types
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from areal_agent.errors import ConfigError
from areal_trainers.attention import choose_kernel
from areal_trainers.platform import PLATFORMS, get_platform
from areal_trainers.platform.base import Platform


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in with torch_npu's documented names that records what it was asked."""
    asked: list[Any] = []

    class Options:
        _timeout: Any = None

    class ProcessGroupHCCL:
        def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
            asked.append((rank, size, options._timeout))

    ProcessGroupHCCL.Options = Options  # type: ignore[attr-defined]
    npu = types.SimpleNamespace(
        is_available=lambda: True,
        set_device=asked.append,
        max_memory_allocated=lambda: 7,
        mem_get_info=lambda: (1, 64),
        reset_peak_memory_stats=lambda: asked.append("peak"),
        empty_cache=lambda: asked.append("empty"),
        synchronize=lambda: asked.append("sync"),
        get_rng_state=lambda: torch.zeros(1),
        set_rng_state=asked.append,
    )
    c10d = types.ModuleType("torch_npu._C._distributed_c10d")
    c10d.ProcessGroupHCCL = ProcessGroupHCCL  # type: ignore[attr-defined]
    for name in ("torch_npu", "torch_npu._C"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, c10d.__name__, c10d)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(torch, "device", lambda *a: a)
    return asked


def test_without_an_accelerator_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_platform("auto").name == "cpu"


def test_an_npu_goes_before_the_cpu_that_hosts_it(torch_npu: Any) -> None:
    assert get_platform("auto").name == "npu"


def test_an_unknown_platform_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="no platform is called 'tpu'"):
        get_platform("tpu")


def test_a_platform_that_is_not_here_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"npu has no usable device here: torch_npu is not installed"):
        get_platform("npu")


def test_npu_asks_torch_npu_by_its_names(torch_npu: Any) -> None:
    p = get_platform("npu")
    assert (p.backend, p.visible_devices_env) == ("hccl", "ASCEND_RT_VISIBLE_DEVICES")
    assert p.device(3) == ("npu", 3)
    assert p.memory() == (7, 64)
    p.synchronize()
    p.empty_cache()
    p.process_group(HashStore(), 1, 2, timedelta(seconds=5), loopback=True)
    assert torch_npu == [3, "sync", "empty", (1, 2, timedelta(seconds=5))]


def test_an_npu_computes_in_bfloat16_with_its_fused_attention_and_adds_in_float32(torch_npu: Any) -> None:
    p = get_platform("npu")
    assert choose_kernel(p.attention, p.default_dtype) == "npu_fusion"
    assert choose_kernel(p.attention, torch.float32) == "sdpa"
    assert (p.default_dtype, p.widest_float) == (torch.bfloat16, torch.float32)


def test_an_npus_random_state_comes_back_as_it_was(torch_npu: Any) -> None:
    p = get_platform("npu")
    p.reset_peak()
    p.set_rng_state(p.rng_state())
    assert torch_npu[0] == "peak"
    assert torch.equal(torch_npu[1], torch.zeros(1))


def test_torch_npu_without_a_device_is_a_sentence(torch_npu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.npu, "is_available", lambda: False)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch_npu sees no device; check the driver and ASCEND_RT_VISIBLE"):
        get_platform("npu")
    assert get_platform("auto").name == "cpu"


@pytest.mark.parametrize("name", PLATFORMS)
def test_every_platform_has_the_whole_protocol(name: str) -> None:
    public = {m for m in vars(Platform) if not m.startswith("_")} | set(Platform.__annotations__)
    platform = PLATFORMS[name]()
    assert {m for m in public if not hasattr(platform, m)} == set()


def test_cpu_memory_is_bytes_of_this_process() -> None:
    peak, total = get_platform("cpu").memory()
    assert 50 * 2**20 < peak < total
