"""Going on with a reply from the tokens it already has, on another engine or after a change of weights.

Invariant: what is asked for is the rest of the same reply, or the reason why there is no such thing.
"""

from __future__ import annotations

from dataclasses import replace

from areal_gateway.fleet.types import EngineSampling, Span

NOT_CONTINUABLE = ("presence_penalty", "frequency_penalty", "bad_words", "structured_outputs")
"""Sampling settings that look at the reply so far, which after a continuation is part of the prompt."""


def merge_spans(a: list[Span], b: list[Span]) -> list[Span]:
    """Spans of a reply's parts, one after the other; neighbours of one version become one."""
    out = list(a)
    for start, end, version in b:
        if out and out[-1][2] == version and out[-1][1] == start:
            out[-1] = (out[-1][0], end, version)
        else:
            out.append((start, end, version))
    return out


def shifted(spans: list[Span], by: int) -> list[Span]:
    """Spans of a part that begins at token `by` of its reply."""
    return [(start + by, end + by, version) for start, end, version in spans]


def not_continuable(sampling: EngineSampling) -> str:
    """Why a reply sampled like this cannot be gone on with, or ""."""
    if sampling.stop:
        return "a stop string may straddle the cut, so the reply cannot be continued exactly"
    if used := [name for name in NOT_CONTINUABLE if sampling.extra.get(name)]:
        return f"{', '.join(used)} look at the reply so far, so it cannot be continued exactly"
    return ""


def remaining(sampling: EngineSampling, done: int) -> EngineSampling:
    """Sampling of the rest of a reply after `done` tokens: smaller budgets, and a seed of its own.

    The same seed would draw for token `done` what it drew for token 0.
    """
    extra = dict(sampling.extra)
    if "min_tokens" in extra:
        extra["min_tokens"] = max(0, extra["min_tokens"] - done)
    seed = None if sampling.seed is None else (sampling.seed + 0x9E3779B1 * done) % 2**31
    return replace(sampling, max_tokens=sampling.max_tokens - done, seed=seed, extra=extra)
