"""Reward functions: running the user's own safely, and verifiers to use as they are."""

from areal_agent.rewards.exact import exact_match
from areal_agent.rewards.runner import Reward, RewardRunner

__all__ = ["Reward", "RewardRunner", "exact_match"]
