"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_support import Served, build_model_folder, make_app

from areal_agent.config import GatewayConfig
from areal_gateway.tokens import Tokens


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(scope="session")
def tokens(model_folder: Path) -> Tokens:
    return Tokens.load(model_folder, GatewayConfig())


@pytest.fixture(scope="session")
def thinking_tokens(model_folder: Path) -> Tokens:
    return Tokens.load(model_folder, GatewayConfig(enable_thinking=True))


@pytest.fixture
async def thinking(thinking_tokens: Tokens, tmp_path: Path) -> AsyncIterator[Served]:
    """A gateway whose model thinks before it answers."""
    gateway = make_app(thinking_tokens, tmp_path)
    await gateway.start()
    yield gateway
    await gateway.stop()


@pytest.fixture
async def served(tokens: Tokens, tmp_path: Path) -> AsyncIterator[Served]:
    gateway = make_app(tokens, tmp_path)
    await gateway.start()
    yield gateway
    await gateway.stop()
