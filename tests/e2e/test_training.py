"""`areal_agent.train` on real engines, with a blank model: the whole path, nothing of it simulated.

What a trained agent scores is the evidence run's business (`make train`); here it is the machinery that is
specified: versions, staleness, exactness, what is written, and that nothing is left behind.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import areal_agent

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

SMALL = {
    "rollout": {"groups_per_step": 4, "group_size": 2, "concurrency": 8},
    "trainer": {"steps": 3},
    "eval": {"tasks": 8, "every": 0},
    "fleet": {"engines": 1, "max_model_len": 512},
}


def config(**sections) -> dict:
    return {name: SMALL.get(name, {}) | sections.get(name, {}) for name in {*SMALL, *sections}}


def length(task, result) -> float:
    """A reward that a blank model's replies differ in."""
    return (len(result or "") % 7) / 7


@pytest.fixture
def calculator(examples):
    import calculator

    return calculator


def test_an_untold_agent_is_trained_while_its_calls_live_through_updates(
    calculator, blank_model, tmp_path, nothing_left
):
    """η = 1, two engines: admission binds, every span is the engine's, and the checkpoint is what they serve."""
    result = areal_agent.train(
        calculator.agent,
        length,
        dataset=calculator.dataset()[:64],
        eval_dataset=calculator.eval_dataset()[:8],
        model=blank_model,
        config=config(fleet={"engines": 2}, sampling={"max_tokens": 200}, trainer={"steps": 4}),
        run_dir=tmp_path / "run",
    )
    s = result.summary
    assert (s["steps"], s["final_version"], s["calls_incomplete"]) == (4, 4, 0)
    assert s["staleness_max"] <= 1
    assert s["logprob_gap_max"] <= 1e-3
    assert s["multi_version_calls"] >= 1
    assert s["tokens_trained"] > 0
    assert (s["calls"]["failed"], s["calls"]["aborted"]) == (0, 0)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == s
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in steps if m["source"] == "trainer"] == [1, 2, 3, 4]
    assert list((tmp_path / "run" / "tensorboard").rglob("events.out.tfevents.*"))
    assert_loads_in_transformers(result.checkpoint, blank_model)


def assert_loads_in_transformers(checkpoint: Path, start: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(checkpoint).encode("2+2")
    trained, blank = (
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (checkpoint, start)
    )
    moved = [not torch.equal(a, b) for a, b in zip(trained.parameters(), blank.parameters(), strict=True)]
    assert any(moved)


def test_synchronous_training_is_eta_zero_and_two_ranks_share_the_work(
    calculator, blank_model, tmp_path, nothing_left
):
    result = areal_agent.train(
        calculator.agent,
        length,
        dataset=calculator.dataset()[:64],
        model=blank_model,
        config=config(
            rollout={"max_staleness": 0}, trainer={"steps": 2, "ranks": 2}, sampling={"max_tokens": 32}
        ),
        run_dir=tmp_path / "run",
    )
    s = result.summary
    assert (s["steps"], s["final_version"], s["staleness_max"]) == (2, 2, 0)
    assert s["multi_version_calls"] == 0
    assert s["logprob_gap_max"] <= 1e-3


@pytest.mark.slow
def test_an_adapter_alone_is_trained_and_sent(calculator, blank_model, tmp_path, nothing_left):
    """Engines hold the blank model all along; A and B are replaced in them while replies go on."""
    import torch
    from safetensors.torch import load_file

    result = areal_agent.train(
        calculator.agent,
        length,
        dataset=calculator.dataset()[:64],
        model=blank_model,
        config=config(
            fleet={"engines": 2},
            sampling={"max_tokens": 200},
            trainer={"steps": 4, "learning_rate": 3e-3, "lora": {"rank": 8}},
            weights={"adapter": "adapter"},
        ),
        run_dir=tmp_path / "run",
    )
    s = result.summary
    assert (s["steps"], s["final_version"], s["calls_incomplete"]) == (4, 4, 0)
    assert s["multi_version_calls"] >= 1
    assert s["logprob_gap_max"] < 1e-4
    assert result.checkpoint is not None
    trained = load_file(result.checkpoint / "adapter" / "adapter_model.safetensors")
    moved = [name for name, b in trained.items() if "lora_B" in name and torch.count_nonzero(b)]
    assert moved, "B is zero at first"
    assert_loads_in_transformers(result.checkpoint, blank_model)


def test_a_langgraph_graph_is_trained_unmodified_with_every_call_labelled_by_its_node(
    examples, blank_model, tmp_path, nothing_left
):
    import langgraph_react

    result = areal_agent.train(
        langgraph_react.agent,
        length,
        dataset=langgraph_react.dataset()[:64],
        model=blank_model,
        config=config(trainer={"steps": 1}, sampling={"max_tokens": 32}),
        run_dir=tmp_path / "run",
    )
    assert result.summary["final_version"] == 1
    calls = langgraph_react.calls_by_node(tmp_path / "run")
    assert calls.total() == result.summary["calls_total"] > 0
    assert set(calls) == {"think"}
