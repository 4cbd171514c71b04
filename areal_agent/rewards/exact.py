"""The simplest verifier: the answer is the expected text, give or take spacing and case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def exact_match(
    field: str = "answer", *, normalise: bool = True
) -> Callable[[Mapping[str, Any], Any], float | None]:
    """A reward function: 1.0 when the agent's result equals `task[field]`, else 0.0.

    Both sides are compared as text; with `normalise`, white space is collapsed and case is ignored.
    A task without that field has no truth to compare with: its reward is missing (None).

        areal_agent.train(agent, exact_match("answer"), ...)
    """

    def clean(value: Any) -> str:
        text = str(value)
        return " ".join(text.split()).casefold() if normalise else text

    def reward(task: Mapping[str, Any], result: Any) -> float | None:
        if field not in task:
            return None
        return float(result is not None and clean(result) == clean(task[field]))

    return reward
