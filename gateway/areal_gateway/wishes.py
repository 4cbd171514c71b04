"""The sampling a request wishes, where the run does not pin it (`sampling.pinned: false`).

Invariant: what the engine is asked for is what the call's record says, and a call is trained only where the
trainer can compute the logprobs of the very distribution that was sampled: the softmax at the call's
temperature, of all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from areal_gateway.fields import integer, number
from areal_gateway.records import Sampling

LEAST_TEMPERATURE = 0.01
"""Below it vLLM samples at 0.01, or greedily: not from the distribution that was asked for."""

MOST_TEMPERATURE = 2.0
"""Of every API."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """None: not wished. `top_k` 0 keeps all."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    @classmethod
    def of(cls, body: Mapping[str, Any], honoured: Mapping[str, Any]) -> Wishes:
        """From a request's body; `honoured`: the fields its API has. Raises GatewayError (400)."""
        asked = {k: body[k] for k in cls.__slots__ if k in honoured and body.get(k) is not None}
        top_k = integer(asked, "top_k", low=-1, high=2**31 - 1) if "top_k" in asked else None
        return cls(
            number(asked, "temperature", low=0.0, high=MOST_TEMPERATURE) if "temperature" in asked else None,
            number(asked, "top_p", low=1e-6, high=1.0) if "top_p" in asked else None,
            None if top_k is None else max(top_k, 0),  # vLLM's -1 keeps all
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the fields that were wished."""
        return tuple(name for name in type(self).__slots__ if getattr(self, name) is not None)

    def over(self, pinned: Sampling) -> Sampling:
        """The session's sampling with what is wished instead."""
        return replace(pinned, **{name: getattr(self, name) for name in self.names})

    def untrained(self, pinned: Sampling) -> str | None:
        """Why a call sampled so is not trained; None where it is."""
        s = self.over(pinned)
        if s.temperature < LEAST_TEMPERATURE:
            return f"its temperature of {s.temperature:g} leaves no distribution to train on"
        if s.top_p != 1 or s.top_k != 0:
            return (
                f"top_p {s.top_p:g} and top_k {s.top_k} cut the distribution it was sampled from, and the trainer "
                "computes the logprobs of the whole one"
            )
        return None
