"""One measurement of benchmarks/trainer.py in a process of its own, printed as a line of JSON.

Memory is the process's peak resident size above what it held right before the measured work: the kernel's
high-water mark (VmHWM), set back at that point through /proc/self/clear_refs.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from areal_trainers import attention
from areal_trainers.logprobs import head_logprobs, token_logprobs
from areal_trainers.model import Policy, shard
from areal_trainers.packing import Item, MicroBatch, assign, pack, plan
from areal_trainers.platform import get_platform
from areal_trainers.ranks import join_ranks

MIB = 2**20
HIDDEN = 576
"""SmolLM2-135M's width; its vocabulary is 49 152."""


def resident(field: str) -> int:
    """Bytes of VmRSS or VmHWM."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measured(
    work: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """(median seconds, peak MiB above the start) of `work`, the first run of several left out of the time."""
    Path("/proc/self/clear_refs").write_text("5")
    start = resident("VmRSS")
    times = []
    for _ in range(repeats + 1):
        begin = clock()
        work()
        times.append(clock() - begin)
    return statistics.median(times[1:] or times), (resident("VmHWM") - start) / MIB


def head(kind: str, vocabulary: int, tokens: int, repeats: int) -> dict[str, float]:
    """Forward and backward of hidden states -> logprob (and the entropy, logged) at temperature 1."""
    torch.manual_seed(0)
    weight = torch.randn(vocabulary, HIDDEN).mul_(0.05).requires_grad_()
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    labels, temperatures = torch.randint(vocabulary, (tokens,)), torch.ones(tokens)
    (hidden[:8] @ weight[:64].T).sum().backward()  # libraries load their buffers before memory counts

    def work() -> None:
        weight.grad = hidden.grad = None
        if kind == "fused":
            logprobs, _ = head_logprobs(hidden, weight, None, labels, temperatures)
        else:
            log_p = ((hidden @ weight.T) / temperatures[:, None]).log_softmax(-1)
            logprobs = log_p.gather(-1, labels[:, None])[:, 0]
            with torch.no_grad():
                (log_p.exp() * log_p).sum(-1).neg_()
        logprobs.mean().backward()

    seconds, mib = measured(work, repeats)
    return {"s": seconds, "MiB": mib}


def log_normal_items(vocabulary: int, count: int, seed: int = 0) -> list[Item]:
    """Lengths of median 100 and σ = 1, at most 2000; all but the first token predicted."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(100), 1.0, count), 4, 2000).astype(int)
    return [Item(rng.integers(1, vocabulary, n), np.arange(n) > 0) for n in lengths]


def rows(kind: str, model: str, budget: int, count: int, repeats: int) -> dict[str, float]:
    """Forward and backward of the same sequences and model, packed or padded, under one token budget.

    Padded is transformers' own model: rows in the order they came, or by length ("sorted"), as many as fit
    the budget when padded to the longest. All three use the same head, on predicted tokens only.
    """
    own = "areal_packed" if kind == "packed" else "sdpa"
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=own).eval()
    items = log_normal_items(lm.config.vocab_size, count)
    valid = sum(map(len, items))
    if kind == "packed":
        policy = Policy(lm)
        batches = [pack(items, indices) for indices in assign([len(i) for i in items], budget)[0]]
        computed = sum(b.token_ids.numel() for b in batches)

        def work() -> None:
            for batch in batches:
                (-policy(batch)[0].sum() / valid).backward()
    else:
        padded = list(padded_batches(items, budget, by_length=kind == "sorted"))
        computed = sum(ids.numel() for ids, _ in padded)

        def work() -> None:
            for ids, mask in padded:
                states = lm.base_model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
                labels = ids[:, 1:][mask[:, 1:]]
                flat = states[:, :-1][mask[:, 1:]]
                weight = lm.lm_head.weight
                logprobs, _ = head_logprobs(flat, weight, None, labels, torch.ones(len(labels)))
                (-logprobs.sum() / valid).backward()

    seconds, mib = measured(work, repeats)
    norm = float(torch.stack([p.grad.norm() for p in lm.parameters() if p.grad is not None]).norm())
    return {"s": seconds, "MiB": mib, "valid": valid, "computed": computed, "norm": norm / (repeats + 1)}


def siblings(vocabulary: int, groups: int, rng: np.random.Generator) -> list[Item]:
    """Groups of 8 replies of 100 tokens to one prompt of 300."""
    items = []
    for _ in range(groups):
        prompt = rng.integers(1, vocabulary, 300)
        for _ in range(8):
            ids = np.concatenate([prompt, rng.integers(1, vocabulary, 100)])
            items.append(Item(ids, np.arange(400) >= 300))
    return items


def branches(vocabulary: int, sessions: int, rng: np.random.Generator) -> list[Item]:
    """Sessions of 4 turns of 60 tokens each after a prompt of 300; at every turn a side call of 60 branches off.

    Replies are the second half of a turn; one that branches share is trained in the first of them.
    """
    items = []
    for _ in range(sessions):
        trunk = rng.integers(1, vocabulary, 300 + 4 * 60)
        at = np.arange(len(trunk))
        items.append(Item(trunk, (at >= 300) & ((at - 300) % 60 >= 30)))
        for turn in range(4):
            ids = np.concatenate([trunk[: 300 + turn * 60], rng.integers(1, vocabulary, 60)])
            items.append(Item(ids, np.arange(len(ids)) >= len(ids) - 30))
    return items


def strangers(vocabulary: int, count: int, rng: np.random.Generator) -> list[Item]:
    """Sequences of 100 to 500 tokens that have nothing in common."""
    return [Item(rng.integers(1, vocabulary, n), np.arange(n) > 0) for n in rng.integers(100, 500, count)]


SHAPES = {"siblings": siblings, "branches": branches, "strangers": strangers}


def prefixes(
    shape: str, share: str, model: str, count: int, budget: int, width: str, repeats: int
) -> dict[str, float]:
    """Plan, pack, forward and backward of a batch, common beginnings computed once ("shared") or not ("apart").

    width: "small" is the model given, "wide" one of SmolLM2-135M's width with 4 layers. Seconds are one core's,
    so that what else the machine does is not in them.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if width == "wide":
        config = LlamaConfig(
            vocab_size=4096,
            hidden_size=HIDDEN,
            intermediate_size=1536,
            num_hidden_layers=4,
            num_attention_heads=9,
            num_key_value_heads=3,
        )
        lm = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()
    else:
        lm = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation=attention.NAME
        ).eval()
    policy = Policy(lm)
    items = SHAPES[shape](lm.config.vocab_size, count, np.random.default_rng(0))
    predicted = sum(i.predicted for i in items)
    computed = 0

    def work() -> None:
        nonlocal computed
        policy.zero_grad()
        computed = 0
        sequences = [i.token_ids for i in items]
        for indices in plan(sequences, budget, share_prefixes=share == "shared")[0]:
            micro = pack(items, indices, share_prefixes=share == "shared")
            computed += micro.token_ids.numel()
            (-policy(micro)[0].sum() / predicted).backward()

    seconds, mib = measured(work, repeats, time.process_time)
    norm = float(torch.stack([p.grad.norm() for p in lm.parameters() if p.grad is not None]).norm())
    return {"s": seconds, "MiB": mib, "tokens": computed, "norm": norm}


def padded_batches(items: list[Item], budget: int, *, by_length: bool):
    """([B, L] ids, [B, L] bool mask), B · L at most `budget` unless one row alone is longer."""
    rows = sorted(items, key=len) if by_length else items
    batch: list[Item] = []
    for item in [*rows, None]:
        if batch and (item is None or (len(batch) + 1) * max(map(len, [*batch, item])) > budget):
            ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64)
            mask = torch.zeros_like(ids, dtype=torch.bool)
            for row, one in enumerate(batch):
                ids[row, : len(one)] = torch.from_numpy(one.token_ids)
                mask[row, : len(one)] = True
            yield ids, mask
            batch = []
        if item is not None:
            batch.append(item)


class GatherLogits(torch.autograd.Function):
    """[n, V] of each rank -> [N, V] on all: what sequence parallelism without an own-slice head does."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        ctx.own = slice(rank * len(logits), (rank + 1) * len(logits))
        whole = logits.new_empty(size * len(logits), logits.shape[1])
        dist.all_gather(list(whole.chunk(size)), logits)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0][ctx.own], None, None


class GatheringPolicy(Policy):
    """The same model and Ulysses, with the logits gathered instead of the logprobs."""

    def forward(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.sequence is not None
        part, _ = self.sequence.cut(micro)
        plan = attention.Plan(micro.layout, "sdpa", self.sequence)
        states = self.lm.base_model(
            input_ids=part.token_ids, position_ids=part.position_ids, areal_plan=plan, use_cache=False
        ).last_hidden_state[0]
        head = self.lm.get_output_embeddings()
        assert head is not None
        logits = GatherLogits.apply(head(states), self.sequence.rank, self.sequence.size)
        return token_logprobs(logits[micro.predict], micro.labels, micro.temperatures)  # type: ignore[index]


def sequence(kind: str, vocabulary: int, tokens: int) -> dict[str, float]:
    """Peak of one of two ranks: a two-layer model of SmolLM2's width on one row of `tokens` tokens."""
    torch.manual_seed(0)
    with join_ranks(get_platform("cpu"), 2) as ranks:
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=HIDDEN,
            intermediate_size=1536,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        )
        lm = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()
        policy = shard(lm, ranks.mesh, sequence=ranks.sequence)
        if kind == "logits":
            policy.__class__ = type("Gathering", (GatheringPolicy, type(policy)), {})
        item = Item(np.random.default_rng(0).integers(1, vocabulary, tokens), np.arange(tokens) > 0)
        loss = 0.0

        def work() -> None:
            nonlocal loss
            logprobs, _ = policy(pack([item], [0]))
            (-logprobs.mean() * ranks.size).backward()
            loss = -float(logprobs.detach().mean())

        seconds, mib = measured(work, 0)
        most = ranks.max([mib])[0]
        return {"s": seconds, "MiB": most, "loss": loss} if ranks.first else {}


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    parts: dict[str, Callable[..., dict[str, float]]] = {
        "head": head,
        "rows": rows,
        "prefixes": prefixes,
        "sequence": sequence,
    }
    values = parts[name](*(int(a) if a.isdigit() else a for a in arguments))
    if values:
        print(json.dumps(values), flush=True)
