"""One tree of errors. Each says what happened, with the value, and what to do next.

ArealError
├── ConfigError        a setting, a dataset, a model folder or a port that cannot be used
├── AgentError         the user's agent raised, or returned something it may not
├── RewardError        the user's reward function raised, or returned something that is no number
├── GatewayError       the gateway refused or failed a request (carries status and code)
├── EngineError        an engine could not start, died, or broke its protocol
├── WeightUpdateError  a weight transaction did not commit
└── TrainerError       the trainer stopped, or found a batch it must not train on
"""

from __future__ import annotations


class ArealError(Exception):
    """Base of every error that this project raises on purpose; the CLI prints it as one sentence."""


class ConfigError(ArealError):
    """A setting, a dataset, a model folder or a port cannot be used as given."""


class AgentError(ArealError):
    """The user's agent failed; the original exception is the `__cause__`."""


class RewardError(ArealError):
    """The user's reward function failed or returned something that is not a number or None."""


class GatewayError(ArealError):
    """The gateway answered with an error.

    Attributes:
        status: HTTP status code, or 0 when no answer came.
        code: machine-readable reason, such as `session_sealed` or `unauthorized`.
    """

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class EngineError(ArealError):
    """An engine could not be started, died, or answered outside its protocol."""


class WeightUpdateError(ArealError):
    """A weight transaction did not commit.

    Attributes:
        retry: whether the same version may be offered again in a new epoch.
    """

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


class TrainerError(ArealError):
    """The trainer stopped, or refused a batch it must not train on."""
