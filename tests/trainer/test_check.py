"""The self-check of a machine: it passes here, and what is broken on a device shows as a failed row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_trainer import in_ranks

from areal_trainers import attention, check
from areal_trainers.platform import PLATFORMS
from areal_trainers.platform.cpu import CpuPlatform


class FakePlatform(CpuPlatform):
    """A device family that computes in half precision, as accelerators do."""

    default_dtype = torch.bfloat16


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the check on a FakePlatform with some of its parts replaced; returns the exit code."""

    def run(**parts: Any) -> int:
        platform = type("Replaced", (FakePlatform,), parts)
        monkeypatch.setitem(PLATFORMS, "cuda", platform)
        return check.main(["--platform", "cuda"])

    return run


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("│")]


def test_this_machine_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--platform", "cpu"]) == 0
    said = rows(capsys.readouterr().out)
    for name in ("FSDP2, float32: gradient", "fused output head", "attention sdpa, window", "training state"):
        assert any(name in r and " ok " in r for r in said), name
    assert not any("bfloat16" in r for r in said)  # the CPU's own dtype is float32


def test_an_accelerators_own_dtype_is_checked_too(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert fake() == 0
    said = rows(capsys.readouterr().out)
    (found,) = (r for r in said if "FSDP2, bfloat16: gradient" in r)
    assert float(found.split("│")[2].split()[0]) > 1e-4  # it did compute in bfloat16


def test_a_wrong_kernel_is_found(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One that forgets the window: right without one, wrong with it."""

    def forgetful(q: Any, k: Any, v: Any, layout: Any, scale: Any, window: Any) -> torch.Tensor:
        return attention.class_attention(q, k, v, layout, scale, None)

    attention.KERNELS["forgetful"] = forgetful
    try:
        assert fake(attention="forgetful") == 1
    finally:
        del attention.KERNELS["forgetful"]
    (failed,) = (r for r in rows(capsys.readouterr().out) if "FAILED" in r)
    assert "attention forgetful, window" in failed


def test_what_raises_is_a_failed_row_and_the_rest_is_checked(
    fake: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no link between the devices")

    monkeypatch.setattr(check, "CHECKS", (check.collectives, check.head))
    assert fake(process_group=broken) == 1
    said = rows(capsys.readouterr().out)
    assert any("collectives: RuntimeError: no link" in r for r in said)
    assert any("fused output head" in r and " ok " in r for r in said)


@pytest.mark.parametrize(("name", "sentence"), [("tpu", "no platform is called 'tpu'"), ("npu", "torch_npu")])
def test_a_platform_that_is_not_here_is_a_sentence(
    name: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["--platform", name]) == 2
    assert sentence in capsys.readouterr().err


def _two(out: Path) -> None:
    check.BROADCAST_MIB = 16
    with out.open("a") as file, contextlib.redirect_stdout(file):
        assert check.main(["--platform", "cpu"]) == 0


def test_two_ranks_check_their_collectives(tmp_path: Path) -> None:
    in_ranks(_two, 2, tmp_path / "out")
    said = rows((tmp_path / "out").read_text())
    for name in ("gloo sum over 2 ranks", "broadcast: wrong elements", "FSDP2, float32: gradient"):
        assert any(name in r and " ok " in r for r in said), name
    assert sum("broadcast of 16 MiB" in r for r in said) == 1
