"""areal_agent: train an agent that already exists.

    import areal_agent
    areal_agent.train(agent, reward, dataset=..., model=...)

The names below are the whole public face; they are loaded when first used, so importing is cheap.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_agent.agents import Command as Command
    from areal_agent.config import RunConfig as RunConfig
    from areal_agent.controller import EvalResult as EvalResult
    from areal_agent.errors import (
        AgentError as AgentError,
    )
    from areal_agent.errors import (
        ArealError as ArealError,
    )
    from areal_agent.errors import (
        ConfigError as ConfigError,
    )
    from areal_agent.errors import (
        EngineError as EngineError,
    )
    from areal_agent.errors import (
        GatewayError as GatewayError,
    )
    from areal_agent.errors import (
        RewardError as RewardError,
    )
    from areal_agent.errors import (
        TrainerError as TrainerError,
    )
    from areal_agent.errors import (
        WeightUpdateError as WeightUpdateError,
    )
    from areal_agent.observe import add_label_source as add_label_source
    from areal_agent.observe import observe as observe
    from areal_agent.observe import unobserve as unobserve
    from areal_agent.rewards import exact_match as exact_match
    from areal_agent.session import GatewayClient as GatewayClient
    from areal_agent.session import Session as Session
    from areal_agent.train import (
        TrainResult as TrainResult,
    )
    from areal_agent.train import (
        aevaluate as aevaluate,
    )
    from areal_agent.train import (
        arollout as arollout,
    )
    from areal_agent.train import (
        atrain as atrain,
    )
    from areal_agent.train import (
        evaluate as evaluate,
    )
    from areal_agent.train import (
        rollout as rollout,
    )
    from areal_agent.train import (
        train as train,
    )

_HOMES = {
    "agents": ("Command",),
    "config": ("RunConfig",),
    "controller": ("EvalResult",),
    "errors": (
        "AgentError",
        "ArealError",
        "ConfigError",
        "EngineError",
        "GatewayError",
        "RewardError",
        "TrainerError",
        "WeightUpdateError",
    ),
    "observe": ("add_label_source", "observe", "unobserve"),
    "rewards": ("exact_match",),
    "session": ("GatewayClient", "Session"),
    "train": ("TrainResult", "aevaluate", "arollout", "atrain", "evaluate", "rollout", "train"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


class _Face(ModuleType):
    """Keeps `areal_agent.train` and `areal_agent.observe` the functions they are documented as: importing
    a submodule would otherwise bind the module to that name.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'areal_agent' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"areal_agent.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
