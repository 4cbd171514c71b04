"""Supervised training: it learns what the mask says, in a plain process, and leaves a model behind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_kit import VOCAB, make_model, reference, reference_logprobs

from areal_agent.errors import ConfigError
from areal_trainers import sft
from areal_trainers.sft import SftStep, train_sft


def examples(n: int = 64) -> list[tuple[list[int], list[bool]]]:
    """Random prompts, then the fixed reply 1 2 3; only the reply is predicted."""
    rng = np.random.default_rng(0)
    out = []
    for _ in range(n):
        prompt = rng.integers(4, VOCAB, rng.integers(2, 12)).tolist()
        out.append(([*prompt, 1, 2, 3], [False] * len(prompt) + [True] * 3))
    return out


def test_learns_the_reply_and_saves_it(tmp_path: Path) -> None:
    model = make_model(tmp_path / "start")
    steps: list[SftStep] = []
    result = train_sft(
        model,
        tmp_path / "out",
        examples(),
        steps=60,
        batch_tokens=256,
        learning_rate=1e-2,
        on_step=steps.append,
    )
    assert [s.step for s in steps] == list(range(1, 61))
    assert steps[0].loss > 3
    assert result.loss < 0.3
    logp = reference_logprobs(reference(tmp_path / "out"), [9, 8, 7, 1, 2, 3])
    assert logp[3:].mean() > -0.5
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (model / "tokenizer.json").read_text()


def test_the_loss_is_the_mean_over_predicted_tokens_only(tmp_path: Path) -> None:
    model, rows, steps = make_model(tmp_path / "start"), examples(8), []
    whole = sum(len(ids) for ids, _ in rows)
    train_sft(model, tmp_path / "out", rows, steps=1, batch_tokens=whole, on_step=steps.append)
    oracle = reference(model)
    wanted = [reference_logprobs(oracle, ids)[np.array(mask)] for ids, mask in rows]
    assert steps[0].predicted == 24
    assert steps[0].loss == pytest.approx(-np.concatenate(wanted).mean(), rel=1e-4)


def test_stops_by_time_and_by_callback(tmp_path: Path) -> None:
    model = make_model(tmp_path / "start")
    assert train_sft(model, tmp_path / "a", examples(), seconds=0.5, batch_tokens=128).wall_s < 5
    assert train_sft(model, tmp_path / "b", examples(), steps=50, on_step=lambda s: s.step == 2).steps == 2


def test_same_seed_same_model(tmp_path: Path) -> None:
    model = make_model(tmp_path / "start")
    for out in ("a", "b"):
        train_sft(model, tmp_path / out, examples(), steps=4, batch_tokens=128, seed=3)
    a, b = reference(tmp_path / "a"), reference(tmp_path / "b")
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(
    ("rows", "kw", "sentence"),
    [
        ([], {"steps": 1}, "no examples"),
        ([([1, 2], [True])], {"steps": 1}, "example 0 has 2 tokens but 1 mask"),
        ([([1, 2], [True, False])], {"steps": 1}, "example 0 predicts no token"),
        ([([1, 2], [False, True])], {}, "never stop"),
    ],
)
def test_bad_input_is_a_sentence(tmp_path: Path, rows: list, kw: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train_sft(tmp_path, tmp_path / "out", rows, **kw)


def test_as_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = make_model(tmp_path / "start"), tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"token_ids": i, "loss_mask": m}) + "\n" for i, m in examples(8)))
    args = ["--model", str(model), "--out", str(tmp_path / "out"), "--data", str(data), "--steps", "2"]
    assert sft.main(args) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    data.write_text("{}\n")
    assert sft.main(args) == 1
    assert "line 1: not an object with token_ids" in capsys.readouterr().err
