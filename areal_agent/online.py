"""An online run as its controller sees it: a service makes the sessions, and Ctrl-C is a good end.

Invariant: nothing here opens, closes or drops a session; when a batch is whole the gateway decides, and
when training ends the trainer does, after the batch it is at.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_agent.config import RunConfig
from areal_agent.errors import ConfigError

SAY_S = 30.0
"""Between two lines of a log that say what an online run waits for."""


def settle(config: RunConfig, agent: Any, reward: Any, dataset: Any, eval_dataset: Any) -> bool:
    """Whether the run is online: it is told so, or has no agent. Then `config` says so as well.

    Raises ConfigError for arguments that mean nothing to such a run.
    """
    if agent is not None and not config.online.enabled:
        return False
    config.online.enabled = True
    if dataset is not None:
        raise ConfigError(
            "an online run is trained on what a service asks, and has no use for a dataset; pass none, or an "
            "agent with online.enabled: false"
        )
    if agent is None and (reward is not None or eval_dataset is not None):
        raise ConfigError(
            "an online run without an agent has nothing to call a reward function or an eval_dataset with: the "
            "service's rewards come over POST /v1/rewards; pass an agent as well to have it evaluated"
        )
    if isinstance(eval_dataset, float):
        raise ConfigError(f"eval_dataset={eval_dataset}: an online run has no dataset to split it off")
    return True


def invitation(url: str, key_path: Path) -> list[str]:
    """What somebody needs to point a service at the run."""
    return [
        f"online: point the service at OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=$(cat {key_path})",
        "online: rewards are posted to /v1/rewards; Ctrl-C ends the run after the batch it is at",
    ]


def waiting_for(status: Mapping[str, Any], groups_per_step: int) -> str:
    """What the next step waits for, in words."""
    groups = status.get("groups") or {}
    sessions = (status.get("sessions") or {}).get("open", 0)
    if groups.get("leased"):
        return "training a batch"
    return (
        f"waiting for the service, without limit: {groups.get('ready', 0)} of {groups_per_step} cohorts are "
        f"whole, {groups.get('open', 0)} are filling, {sessions} conversations are open"
    )


@contextlib.contextmanager
def ctrl_c(stop: Callable[[], object]) -> Iterator[None]:
    """The first Ctrl-C inside calls `stop`; a second one is as ever. In other threads it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def first(_signum: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
