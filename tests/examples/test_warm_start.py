"""The warm start keeps to its bounds, and says when it cannot."""

from __future__ import annotations

import dataclasses

import pytest
import small_model
import torch
from small_model.questions import distinct
from small_model.score import score
from small_model.transcripts import Renderer, conversation
from small_model.warm_start import RECIPE, WarmStartFailed, blank, make, make_reliably
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_agent.errors import ArealError

TINY = dataclasses.replace(
    RECIPE,
    hidden_size=32,
    layers=1,
    heads=2,
    kv_heads=1,
    batch_tokens=200,
    clean_steps=2,
    more_steps=1,
    more_rounds=1,
    judged_on=4,
)


@pytest.fixture(autouse=True)
def one_thread():
    """On busy cores two threads take up to a thousand times longer over matrices this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_model_that_did_not_learn_is_refused(tmp_path):
    lines: list[str] = []
    with pytest.raises(WarmStartFailed, match=r"after 3 clean steps the model solves 0\.00"):
        make(tmp_path, TINY, seed=0, say=lines.append)
    assert any("clean transcripts" in line for line in lines)


def test_a_model_outside_the_bounds_of_the_recipe_is_refused(tmp_path):
    recipe = dataclasses.replace(TINY, clean_success=0.0, mediocre_steps=1)
    with pytest.raises(WarmStartFailed, match=r"solves 0\.00 greedily and 0\.00 sampled"):
        make(tmp_path, recipe, seed=0, say=lambda line: None)


def test_another_seed_is_tried_and_the_last_failure_is_told(tmp_path):
    recipe = dataclasses.replace(TINY, clean_steps=1, more_rounds=0)
    lines: list[str] = []
    with pytest.raises(WarmStartFailed, match="after 1 clean steps"):
        make_reliably(tmp_path, recipe, seed=0, say=lines.append)
    assert sum("trying another seed" in line for line in lines) == 2


def test_the_blank_model_is_a_qwen3_with_its_tokenizer(tmp_path):
    folder = blank(tmp_path / "blank", RECIPE, seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert 0.5e6 < model.num_parameters() < 3e6
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id[0] == tokenizer.convert_tokens_to_ids("<|im_end|>")


class Oracle(torch.nn.Module):
    """A model that has learned its transcripts by heart: the next token of whichever begins like the input."""

    def __init__(self, transcripts: list[list[int]], vocab: int) -> None:
        super().__init__()
        self.transcripts, self.vocab = transcripts, vocab

    def forward(self, input_ids, attention_mask, past_key_values, **_):
        seen = past_key_values or [[] for _ in input_ids]
        real = attention_mask[:, -input_ids.shape[1] :]
        seen = [
            s + [t for t, m in zip(row, keep, strict=True) if m]
            for s, row, keep in zip(seen, input_ids.tolist(), real.tolist(), strict=True)
        ]
        logits = torch.zeros(len(seen), 1, self.vocab)
        for i, ids in enumerate(seen):
            for known in self.transcripts:
                if known[: len(ids)] == ids and len(known) > len(ids):
                    logits[i, 0, known[len(ids)]] = 9.0
        return type("Out", (), {"past_key_values": seen, "logits": logits})()


def test_the_score_is_the_share_of_right_answers_whatever_the_batch_is_padded_to(tmp_path):
    import random

    tokenizer = AutoTokenizer.from_pretrained(blank(tmp_path / "blank", RECIPE, seed=0))
    renderer, rng = Renderer(tokenizer), random.Random(0)
    asked = distinct("train", 12)
    kinds = ["right", "guess", "wrong_operator"] * 4
    known = [
        renderer.transcript(conversation(q, kind, rng), form).token_ids  # type: ignore[arg-type]
        for q, kind in zip(asked, kinds, strict=True)
        for form in (0, 1)
    ]
    result = score(Oracle(known, len(tokenizer)), renderer, asked)
    assert result.success == pytest.approx(4 / 12)
    assert result.tool == pytest.approx(4 / 12)


def test_the_model_is_made_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path))
    made = []

    def stand_in(command, **_):
        made.append(command)
        folder = type(tmp_path)(command[3])
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        return type("Done", (), {"returncode": 0})()

    monkeypatch.setattr(small_model.subprocess, "run", stand_in)
    first, second = small_model.build(), small_model.build()
    assert first == second
    assert first.parent == tmp_path
    assert len(made) == 1
    assert small_model.build(seed=7) != first


def test_a_failure_to_make_it_leaves_no_model_and_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path))
    failed = type("Done", (), {"returncode": 3})()
    monkeypatch.setattr(small_model.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ArealError, match="code 3"):
        small_model.build()
    assert not list(tmp_path.glob("*/config.json"))
