"""The packed policy computes what transformers computes for each sequence alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_kit import CONFIGS, VOCAB, make_model, reference, reference_logprobs

from areal_agent.errors import ConfigError
from areal_trainers.model import decoder_layers, load_causal_lm, shard
from areal_trainers.packing import Item, pack
from areal_trainers.platform import get_platform
from areal_trainers.ranks import Ranks, join_ranks


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with join_ranks(get_platform("cpu")) as joined:
        yield joined


def items(lengths: list[int], seed: int = 0, temperature: float = 1.0) -> list[Item]:
    rng = np.random.default_rng(seed)
    return [Item(rng.integers(0, VOCAB, n), np.arange(n) > 0, temperature) for n in lengths]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_models_own(tmp_path: Path, ranks: Ranks, kind: str, temperature: float) -> None:
    oracle = reference(make_model(tmp_path, kind))
    rows = items([31, 2, 17, 30, 9, 3], temperature=temperature)
    with torch.no_grad():
        got, entropy = shard(load_causal_lm(tmp_path), ranks.mesh)(pack(rows, [3, 0, 5, 1, 2, 4]))
    wanted = np.concatenate(
        [reference_logprobs(oracle, rows[i].token_ids.tolist(), temperature)[1:] for i in (3, 0, 5, 1, 2, 4)]
    )
    assert np.abs(wanted).max() > 5  # peaked: a uniform model would hide a wrong mask
    np.testing.assert_allclose(got.numpy(), wanted, atol=2e-4)
    assert (entropy >= 0).all()


def test_no_token_sees_another_sequence(tmp_path: Path, ranks: Ranks) -> None:
    policy = shard(load_causal_lm(make_model(tmp_path)), ranks.mesh)
    rows, other = items([12, 20, 8]), items([12, 20, 8], seed=9)
    with torch.no_grad():
        a = policy(pack(rows, [0, 1, 2]))[0]
        b = policy(pack([other[0], rows[1], other[2]], [0, 1, 2]))[0]
    torch.testing.assert_close(a[11:30], b[11:30], atol=1e-5, rtol=0)
    assert not torch.allclose(a[:11], b[:11], atol=1e-2)


def test_gradients_are_the_models_own(tmp_path: Path, ranks: Ranks) -> None:
    oracle = reference(make_model(tmp_path))
    rows = items([14, 5, 9])
    lm = load_causal_lm(tmp_path)
    shard(lm, ranks.mesh)(pack(rows, [0, 1, 2]))[0].sum().backward()
    for row in rows:
        ids = torch.tensor(row.token_ids)[None]
        logp = oracle(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
        logp.sum().backward()
    for (name, p), (_, q) in zip(lm.named_parameters(), oracle.named_parameters(), strict=True):
        ours, theirs = p.grad.full_tensor(), q.grad  # type: ignore[union-attr]
        assert theirs is not None
        scale = theirs.abs().max()
        torch.testing.assert_close(ours / scale, theirs / scale, atol=2e-4, rtol=0, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_sees_what_fsdp_gathered(tmp_path: Path, ranks: Ranks, dtype: torch.dtype) -> None:
    """Masters stay float32; the fused head runs in the compute dtype and its gradient reaches them."""
    lm = load_causal_lm(make_model(tmp_path, "qwen3 untied"))
    logprobs, _ = shard(lm, ranks.mesh, dtype)(pack(items([14, 5]), [0, 1]))
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    head = lm.get_output_embeddings()
    assert head is not None
    assert head.weight.grad.dtype == torch.float32
    assert head.weight.grad.full_tensor().abs().max() > 0


def test_activation_checkpointing_runs_each_layer_again(tmp_path: Path, ranks: Ranks) -> None:
    make_model(tmp_path)
    ran = []
    for recompute in (False, True):
        lm, count = load_causal_lm(tmp_path), [0]
        layers = decoder_layers(lm)
        policy = shard(lm, ranks.mesh, activation_checkpointing=recompute)
        names = [name for name, _ in lm.named_parameters()]
        for layer in layers:
            layer.mlp.register_forward_pre_hook(lambda *_, c=count: c.__setitem__(0, c[0] + 1))
        policy(pack(items([9]), [0]))[0].sum().backward()
        ran.append((count[0], names))
    assert [n for n, _ in ran] == [2, 4]
    assert ran[0][1] == ran[1][1]  # no wrapper renames a weight


@pytest.mark.parametrize(
    "content", [None, "", "{not json", '{"model_type": "no-such-model"}', '{"model_type": "qwen3"}']
)
def test_an_unreadable_model_folder_is_a_sentence(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=str(folder)) as caught:
        load_causal_lm(folder)
    assert "\n" not in str(caught.value)
