"""Fixtures of the SDK's tests."""

from __future__ import annotations

import pytest
from standin_gateway import ADMIN, StandIn

from areal_agent.agents import AgentRunner
from areal_agent.config import RunConfig
from areal_agent.controller import Group, RolloutController
from areal_agent.episode import EpisodeRunner
from areal_agent.observe import client_environment, observe, unobserve
from areal_agent.rewards import RewardRunner
from areal_agent.session import GatewayClient


class Watched(RolloutController):
    """Keeps the groups that finished, and what ran their sessions."""

    def __init__(self, episodes, config):
        self.groups: list[Group] = []
        self.episodes = episodes
        super().__init__(episodes, config, on_group=self.groups.append)


@pytest.fixture
async def standin():
    gateway = await StandIn().start()
    yield gateway
    await gateway.stop()


@pytest.fixture
async def client(standin):
    async with GatewayClient(standin.url, ADMIN) as c:
        yield c


@pytest.fixture(autouse=True)
def no_provider_keys(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def observed(standin):
    observe()
    with client_environment(standin.url):
        yield
    unobserve()


@pytest.fixture
def controller(client, standin):
    """Builds a controller for an agent and a reward against the stand-in."""

    def build(agent, reward, **settings):
        config = RunConfig.parse({"rollout": settings.pop("rollout", {}), **settings})
        runner = None if reward is None else RewardRunner(reward, config.rollout.reward_timeout_s)
        episodes = EpisodeRunner(
            client,
            AgentRunner(agent),
            runner,
            session_timeout_s=config.rollout.session_timeout_s,
            reward_timeout_s=config.rollout.reward_timeout_s,
            concurrency=config.rollout.concurrency + config.eval.concurrency,
        )
        return Watched(episodes, config)

    return build
