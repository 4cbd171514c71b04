"""After every update: do the engines hold the weights that were sent?

The batch alone cannot tell. Where generation keeps up, its tokens were sampled one version ago, and no
token of it is of the trainer's own version. So each engine is asked for a few tokens right after the
commit, and the trainer computes the same logprobs itself.

Invariant: every serving engine that answers in time is compared, on tokens it stamped with the version just
committed. What could not be asked is said and counted as 0 tokens.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from areal_agent.errors import GatewayError, TrainerError
from areal_agent.trajectory import Batch
from areal_trainers.batch import Gap
from areal_trainers.client import TrainerClient
from areal_trainers.learner import Learner
from areal_trainers.packing import Item
from areal_trainers.ranks import Ranks

PROMPTS = 2
TOKENS = 8
"""Per engine and update: some tens of milliseconds, and a wrong matrix shows in the first token."""

UNANSWERED = (502, 503, 504)
"""Statuses that say the engines did not answer, and nothing of the weights they hold."""


class Probe:
    """Compares engines and trainer under the weights just committed. Every rank calls `check` together.

    Args:
        client: of rank 0; None on the other ranks.
        bound: largest difference (nats) that may pass.
    """

    def __init__(self, client: TrainerClient | None, ranks: Ranks, learner: Learner, bound: float) -> None:
        self._client, self._ranks, self._learner, self._bound = client, ranks, learner, bound

    def check(self, batch: Batch, version: int) -> Gap:
        """Prompts come from `batch`. Raises TrainerError past the bound, or for a version that is not `version`."""
        temperature = batch.sequences[0].temperature
        replies: list[dict[str, Any]] = json.loads(self._ranks.broadcast_bytes(self._ask(batch, temperature)))
        for r in replies:
            if set(r["versions"]) != {version} or any(p is None for p in r["logprobs"]):
                raise TrainerError(
                    f"{r['engine']} answered a probe of version {version} with versions "
                    f"{sorted(set(r['versions']))} and {r['logprobs'].count(None)} missing logprobs"
                )
        if not replies:
            return Gap(0.0, 0)
        ours, _ = self._learner.logprobs([_item(r, temperature) for r in replies])
        gaps = [
            float(np.abs(np.asarray(r["logprobs"]) - o).max()) for r, o in zip(replies, ours, strict=True)
        ]
        worst = int(np.argmax([np.inf if np.isnan(g) else g for g in gaps]))
        if not gaps[worst] <= self._bound:
            raise TrainerError(
                f"{replies[worst]['engine']} and the trainer disagree by {gaps[worst]:.3g} nats "
                f"(logprob_gap_bound = {self._bound:g}) right after version {version} was committed: the engine "
                "does not compute with the weights that were sent, or fleet.dtype and trainer.compute_dtype differ"
            )
        return Gap(gaps[worst], sum(len(r["token_ids"]) for r in replies))

    def _ask(self, batch: Batch, temperature: float) -> bytes | None:
        if self._client is None:
            return None
        prompts: dict[str, list[int]] = {}
        for s in batch.sequences:
            if len(prompts) < PROMPTS and any(s.loss_mask):
                prompts.setdefault(s.group_id, list(s.token_ids[: list(s.loss_mask).index(True)]))
        try:
            replies = self._client.probe(list(prompts.values()), TOKENS, temperature)
        except GatewayError as e:
            if e.status not in UNANSWERED and e.code != "no_answer":
                raise
            print(f"areal_trainers: the engines were not compared after this step: {e}", flush=True)
            replies = []
        return json.dumps(replies).encode()


def _item(reply: dict[str, Any], temperature: float) -> Item:
    prompt, sampled = reply["prompt_ids"], reply["token_ids"]
    return Item(
        token_ids=np.asarray(prompt + sampled, np.int64),
        loss_mask=np.asarray([False] * len(prompt) + [True] * len(sampled)),
        temperature=temperature,
    )
