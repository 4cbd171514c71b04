"""What a fake engine samples: a policy that a test can recompute, scripted replies, and switches for faults.

Invariant: the next token is a pure function of (version of the loaded weights, all tokens before it, seed), see
`policy`. Greedy requests (temperature 0) use no seed, so a prompt plus its own partial reply goes on exactly as
the reply would have, as with a real model. Tests recompute expectations with `expected()`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

VOCAB = 320


class Prefix:
    """Hash of a token prefix, extended in O(1) per token."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        self._hash.update(token.to_bytes(4, "little"))

    def draw(self, *salt: object) -> bytes:
        h = self._hash.copy()
        h.update(repr(salt).encode())
        return h.digest()


def policy(prefix: Prefix, version: int, seed: int | None, vocab: int = VOCAB) -> tuple[int, float]:
    """(token, logprob) that follows `prefix`; seed None is greedy. logprob is in (-3.0, -0.05]."""
    digest = prefix.draw(version, seed)
    token = int.from_bytes(digest[:4], "little") % vocab
    p = 0.05 + 0.9 * int.from_bytes(digest[4:8], "little") / 2**32
    return token, math.log(p)


def expected(
    prompt: list[int], n: int, *, version: int = 0, seed: int | None = None, vocab: int = VOCAB
) -> tuple[list[int], list[float]]:
    """(tokens, logprobs) of an undisturbed reply of `n` tokens under one version."""
    prefix, tokens, logprobs = Prefix(prompt), [], []
    for _ in range(n):
        token, logprob = policy(prefix, version, seed, vocab)
        prefix.push(token)
        tokens.append(token)
        logprobs.append(logprob)
    return tokens, logprobs


@dataclass
class Reply:
    """A scripted reply. `match(prompt_ids)` chooses the request (None: any); `times` None never runs out.

    `logprobs` None gives each token the policy's own logprob; a list may hold None (a missing one).
    """

    tokens: list[int]
    match: Callable[[list[int]], bool] | None = None
    finish_reason: str = "stop"
    logprobs: list[float | None] | None = None
    times: int | None = 1

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("a reply has at least one token")


@dataclass
class Faults:
    """Switches; all off at first. Counts are output tokens of one request.

    `rpc` maps a worker method (areal_join, ...) and `http` a path (/pause, ...) to "error" (500),
    "hang" (never answers), "die" (the engine dies) or, for /update_weight_version, "lie" (200, and
    the label stays). `receive` makes a started receive end in "fail", never end ("hang"), or carry
    a wrong checksum in its first bucket ("corrupt"). `times` bounds how often rpc/http faults fire.
    """

    step_s: float | None = None
    drop_logprob_at: int | None = None
    cut_after: int | None = None
    die_after: int | None = None
    error_after: int | None = None
    abort_after: int | None = None
    generate_status: int | None = None
    rpc: dict[str, str] = field(default_factory=dict)
    http: dict[str, str] = field(default_factory=dict)
    receive: str | None = None
    times: int | None = None
