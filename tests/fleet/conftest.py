"""Engines that several tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_kit import start_vllm, tiny_qwen3


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": tiny_qwen3(root / "tied", tied=True),
        "untied": tiny_qwen3(root / "untied", tied=False),
    }


@pytest.fixture(scope="session")
def vllm_url(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One real engine (tied heads) for every test of the session."""
    process, url = start_vllm(models["tied"], tmp_path_factory.mktemp("vllm") / "engine.log")
    yield url
    process.terminate()
