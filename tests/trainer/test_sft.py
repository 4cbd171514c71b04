"""Supervised training: it learns what the mask says, in a plain process, and leaves a model behind."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from killed_trainer import in_ranks, run_trainer
from safetensors.torch import load_file
from trainer_kit import VOCAB, make_model, reference, reference_logprobs

from areal_agent.config import TrainerConfig
from areal_agent.errors import ConfigError
from areal_trainers import sft
from areal_trainers.model import load_causal_lm, shard
from areal_trainers.packing import Item
from areal_trainers.platform import get_platform
from areal_trainers.ranks import join_ranks
from areal_trainers.sft import SftStep, train_sft


def examples(n: int = 64) -> list[tuple[list[int], list[bool]]]:
    """Random prompts, then the fixed reply 1 2 3; only the reply is predicted."""
    rng = np.random.default_rng(0)
    out = []
    for _ in range(n):
        prompt = rng.integers(4, VOCAB, rng.integers(2, 12)).tolist()
        out.append(([*prompt, 1, 2, 3], [False] * len(prompt) + [True] * 3))
    return out


def settings(**values: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"learning_rate": 3e-3, "warmup_steps": 10} | values)


def test_learns_the_reply_and_saves_it(tmp_path: Path) -> None:
    model = make_model(tmp_path / "start")
    steps: list[SftStep] = []
    result = train_sft(
        model,
        tmp_path / "out",
        examples(),
        settings(steps=60, learning_rate=1e-2),
        batch_tokens=256,
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
    train_sft(model, tmp_path / "out", rows, settings(steps=1), batch_tokens=whole, on_step=steps.append)
    oracle = reference(model)
    wanted = [reference_logprobs(oracle, ids)[np.array(mask)] for ids, mask in rows]
    assert steps[0].predicted == 24
    assert steps[0].loss == pytest.approx(-np.concatenate(wanted).mean(), rel=1e-4)


def test_stops_by_time_and_by_callback(tmp_path: Path) -> None:
    model = make_model(tmp_path / "start")
    long = settings(steps=10**6)
    assert train_sft(model, tmp_path / "a", examples(), long, seconds=0.5, batch_tokens=128).wall_s < 5
    assert train_sft(model, tmp_path / "b", examples(), long, on_step=lambda s: s.step == 2).steps == 2


def test_same_seed_same_model(tmp_path: Path) -> None:
    model = make_model(tmp_path / "start")
    for out in ("a", "b"):
        train_sft(model, tmp_path / out, examples(), settings(steps=4, seed=3), batch_tokens=128)
    a, b = reference(tmp_path / "a"), reference(tmp_path / "b")
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(
    ("rows", "kw", "sentence"),
    [
        ([], {}, "no examples"),
        ([([1, 2], [True])], {}, "example 0 has 2 tokens but 1 mask"),
        ([([1, 2], [True, False])], {}, "example 0 predicts no token"),
        ([([1, 2], [False, True])], {"resume": True}, "nothing to resume from"),
        ([([1, 2], [False, True])], {}, "holds no config.json"),
    ],
)
def test_bad_input_is_a_sentence(tmp_path: Path, rows: list, kw: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train_sft(tmp_path, tmp_path / "out", rows, settings(), **kw)


def write(data: Path, rows: list[tuple[list[int], list[bool]]]) -> Path:
    data.write_text("".join(json.dumps({"token_ids": i, "loss_mask": m}) + "\n" for i, m in rows))
    return data


def test_as_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = make_model(tmp_path / "start"), write(tmp_path / "data.jsonl", examples(8))
    out = tmp_path / "out"
    args = ["--model", str(model), "--out", str(out), "--data", str(data), "--steps", "2"]
    assert sft.main(args) == 0
    assert (out / "model.safetensors").exists()

    def refused(*options: str) -> str:
        assert sft.main([*args, *options]) == 1
        return capsys.readouterr().err

    assert "there is a training state already" in refused()
    assert "other examples, another batch_tokens or another seed" in refused(
        "--resume", "--batch-tokens", "9"
    )
    assert "trainer.schedule" in refused("--schedule", "square")
    assert "does not divide trainer.ranks = 1" in refused("--sequence-parallel", "2")
    data.write_text("{}\n")
    assert "line 1: not an object with token_ids" in refused()


def test_every_option_of_the_program_says_what_it_is_and_its_default() -> None:
    said = " ".join(sft.arguments().format_help().split())
    for name in sft.SETTINGS:
        assert f"--{name.replace('_', '-')}" in said
        assert f"{TrainerConfig.model_fields[name].description} (default: " in said


RUN = {"--steps": "9", "--batch-tokens": "64", "--warmup-steps": "3", "--schedule": "cosine"}
RUN |= {"--weight-decay": "0.01", "--checkpoint-every": "2", "--microbatch-tokens": "40"}


@pytest.mark.parametrize(
    ("ranks", "kill"), [(1, ("update", 6)), (1, ("checkpoint half written", 2)), (2, ("update", 6))]
)
def test_killed_and_resumed_it_ends_with_the_same_weights_bit_for_bit(
    tmp_path: Path, ranks: int, kill: tuple[str, int]
) -> None:
    model, data = make_model(tmp_path / "start"), write(tmp_path / "data.jsonl", examples(16))

    def run(out: str, *options: str, kill: tuple[str, int] | None = None) -> tuple[int, str]:
        args = ["--model", str(model), "--data", str(data), "--out", str(tmp_path / out), *options]
        args += [word for option in RUN.items() for word in option]
        return run_trainer(args, {}, tmp_path / "log", kill, program=sft.main, ranks=ranks)

    code, said = run("whole")
    assert code == 0, said
    code, said = run("cut", kill=kill)
    assert code == -signal.SIGKILL, said
    assert not (tmp_path / "cut").exists()
    code, said = run("cut", "--resume")
    assert code == 0, said
    assert "9 steps" in said
    a, b = (load_file(tmp_path / out / "model.safetensors") for out in ("whole", "cut"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[n], p) for n, p in reference(model).state_dict().items() if n in a)


def gradient(model: Path, sequence_parallel: int, recompute: bool, out: Path) -> None:
    """The step's loss and gradient in float64, written by rank 0."""
    with join_ranks(get_platform("cpu"), sequence_parallel) as ranks:
        lm = load_causal_lm(model).double()
        policy = shard(lm, ranks.mesh, sequence=ranks.sequence, activation_checkpointing=recompute)
        items = [Item(np.asarray(i), np.asarray(m)) for i, m in examples(11)]
        loss = sft._loss_and_gradient(policy, ranks, items, 40, share_prefixes=True)
        whole = {n: p.grad.full_tensor() for n, p in lm.named_parameters()}  # type: ignore[union-attr]
        if ranks.first:
            torch.save(whole | {"loss": torch.tensor(loss)}, out)


def test_two_ranks_have_the_gradient_of_one(tmp_path: Path) -> None:
    model, one = make_model(tmp_path / "start"), tmp_path / "one"
    in_ranks(gradient, 1, model, 1, False, one)
    wanted = torch.load(one)
    for sequence_parallel, recompute in ((1, False), (2, True)):
        two = tmp_path / f"two-{sequence_parallel}"
        in_ranks(gradient, 2, model, sequence_parallel, recompute, two)
        found = torch.load(two)
        assert found.keys() == wanted.keys()
        scale = max(g.abs().max() for g in wanted.values())
        for name in wanted:
            torch.testing.assert_close(found[name] / scale, wanted[name] / scale, atol=1e-9, rtol=0)
