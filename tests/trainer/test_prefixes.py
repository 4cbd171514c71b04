"""Common beginnings computed once: found as a trie has them, planned within budget, and exact on random trees.

Exactness under every recipe, rank count and sequence parallelism is test_invariance.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance_rank import in_float64
from trainer_kit import VOCAB, make_model

from areal_agent.config import TrainerConfig
from areal_trainers.attention import NAME
from areal_trainers.model import Policy, load_causal_lm
from areal_trainers.packing import WORTH_SHARING, Item, pack, plan
from areal_trainers.prefixes import REPEATED, Beginnings, paths

KINDS = ["qwen3 tied", "mistral, window 6"]


@st.composite
def forests(draw: st.DrawFn, most: int = 12) -> list[np.ndarray]:
    """Sequences that branch off one another anywhere: siblings, whole repetitions, beginnings of others, strangers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    out: list[np.ndarray] = []
    for _ in range(draw(st.integers(1, most))):
        stem = out[int(rng.integers(len(out)))] if out and rng.random() < 0.8 else np.empty(0, np.int64)
        stem = stem[: int(rng.integers(len(stem) + 1))]
        own = rng.integers(0, VOCAB, int(rng.integers(0 if len(stem) else 1, 12)))
        out.append(np.concatenate([stem, own]).astype(np.int64))
    return out


def prefixes_of(sequences: Sequence[np.ndarray]) -> set[tuple[int, ...]]:
    """The nodes of their trie."""
    return {tuple(s[: n + 1].tolist()) for s in sequences for n in range(len(s))}


@given(forests())
def test_a_row_has_each_beginning_once_and_each_sequence_along_its_path(sequences: list[np.ndarray]) -> None:
    found, tokens = paths(sequences)
    assert tokens == len(prefixes_of(sequences))
    node: dict[int, tuple[int, ...]] = {}
    for s, path in zip(sequences, found, strict=True):
        assert len(path) == len(s)
        for n, place in enumerate(path.tolist()):
            assert node.setdefault(place, tuple(s[: n + 1].tolist())) == tuple(s[: n + 1].tolist())
    assert sorted(node) == list(range(tokens))


@given(forests(), st.randoms())
def test_any_members_cost_what_their_trie_has(sequences: list[np.ndarray], random) -> None:
    members = random.sample(range(len(sequences)), random.randint(1, len(sequences)))
    chosen = [sequences[i] for i in members]
    once = len(prefixes_of(chosen))
    assert Beginnings(sequences).distinct(members) == once
    again = sum(map(len, chosen)) - once
    assert Beginnings(sequences).cost(members) == pytest.approx(once + REPEATED * again)


@given(forests(30), st.integers(1, 60), st.integers(1, 4))
def test_a_plan_holds_every_sequence_once_within_budget_and_is_no_worse_than_without(
    sequences: list[np.ndarray], budget: int, ranks: int
) -> None:
    with_it, without = (plan(sequences, budget, ranks, share_prefixes=share) for share in (True, False))
    beginnings = Beginnings(sequences)
    for shares in (with_it, without):
        assert len({len(share) for share in shares}) == 1
        assert sorted(i for share in shares for micro in share for i in micro) == list(range(len(sequences)))
        for micro in (m for share in shares for m in share):
            assert beginnings.distinct(micro) <= budget or len(micro) == 1

    def busiest(shares: list[list[list[int]]]) -> float:
        return max(sum(beginnings.cost(micro) for micro in share) for share in shares)

    assert busiest(with_it) <= busiest(without)


def test_siblings_share_a_micro_batch_and_their_prompt() -> None:
    """16 prompts of 300 tokens with 8 replies of 100 each, shuffled: 1100 tokens a group instead of 3200."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, VOCAB, (16, 300))
    sequences = [np.concatenate([p, rng.integers(0, VOCAB, 100)]) for p in prompts for _ in range(8)]
    sequences = [sequences[i] for i in rng.permutation(128)]
    beginnings = Beginnings(sequences)
    for ranks in (1, 2, 4):
        shares = plan(sequences, 8192, ranks, share_prefixes=True)
        computed = [sum(beginnings.distinct(micro) for micro in share) for share in shares]
        assert sum(computed) < 1.05 * 16 * 1100
        assert max(computed) < 1.1 * 16 * 1100 / ranks


def test_what_is_hardly_shared_is_packed_as_it_is() -> None:
    """Two of 100 tokens that share 9 (4.5 %), and that share 10."""
    rng = np.random.default_rng(0)
    assert 0.045 < WORTH_SHARING <= 0.05
    for alike in (9, 10):
        own = rng.permutation(200).reshape(2, 100)
        own[1, :alike] = own[0, :alike]
        items = [Item(ids, np.ones(100, bool)) for ids in own]
        row = pack(items, [0, 1], share_prefixes=True)
        assert row.token_ids.shape[1] == (200 if alike == 9 else 190)
        assert (row.layout.whole is None) == (alike == 9)
        assert row.labels.tolist() == [t for ids in own for t in ids[1:].tolist()]


@pytest.fixture(scope="module", params=KINDS)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """In float64 throughout."""
    lm = load_causal_lm(make_model(tmp_path_factory.mktemp("model"), request.param))
    assert lm.config._attn_implementation == NAME
    return Policy(in_float64(lm))


def loss_and_gradient(
    policy: Policy, items: list[Item], budget: int, *, share: bool
) -> tuple[float, int, dict[str, torch.Tensor]]:
    """(Σ weight · logprob + ½ weight · entropy, tokens computed, gradients), over the micro-batches of a plan."""
    policy.zero_grad()
    total, tokens = 0.0, 0
    for indices in plan([i.token_ids for i in items], budget, share_prefixes=share)[0]:
        micro = pack(items, indices, share_prefixes=share)
        logprobs, entropies = policy(micro)
        loss = (micro.columns["weight"] * (logprobs + 0.5 * entropies)).sum()
        loss.backward()
        total += float(loss.detach())
        tokens += micro.token_ids.shape[1]
    return (
        total,
        tokens,
        {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None},
    )


@settings(deadline=None, max_examples=25)
@given(forests(10), st.integers(0, 2**32 - 1), st.sampled_from([20, 50, 10**6]))
def test_loss_and_every_gradient_of_a_random_tree(
    policy: Policy, sequences: list[np.ndarray], seed: int, budget: int
) -> None:
    """Some tokens of a beginning are trained in several of its sequences, at different temperatures."""
    rng = np.random.default_rng(seed)
    items = []
    for ids in sequences:
        mask = rng.random(len(ids)) < 0.7
        mask[0] = False
        weights = {"weight": rng.normal(size=int(mask.sum()))}
        items.append(Item(ids, mask, float(rng.choice([1.0, 0.7])), weights))
    once, computed, gradients = loss_and_gradient(policy, items, budget, share=True)
    apart, all_tokens, wanted = loss_and_gradient(policy, items, 10**6, share=False)
    assert once == pytest.approx(apart, abs=1e-9 * max(1.0, abs(apart)))
    assert computed <= all_tokens == sum(map(len, sequences))
    scale = max([1.0, *(float(g.abs().max()) for g in wanted.values())])
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-9 * scale, rtol=0, msg=name)


def test_it_is_on_unless_switched_off() -> None:
    assert TrainerConfig().share_prefixes
