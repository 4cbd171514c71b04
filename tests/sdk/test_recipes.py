"""Recipes preset parts, parts win over presets, and what must be chosen is not guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from areal_agent.checks import trainable
from areal_agent.config import AlgorithmConfig, RunConfig
from areal_agent.errors import ConfigError
from areal_agent.recipes import RECIPES, RecipeName, table
from areal_agent.settings import resolve

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"


def algorithm(**values: Any) -> AlgorithmConfig:
    return RunConfig.parse({"algorithm": values}).algorithm


def test_every_recipe_has_a_row() -> None:
    assert tuple(RECIPES) == get_args(RecipeName)


@pytest.mark.parametrize("name", RECIPES)
def test_a_preset_holds_valid_values_of_parts(name: RecipeName) -> None:
    assert algorithm(recipe=name) == algorithm(recipe=name, **RECIPES[name].preset)


def test_what_is_set_wins_over_the_preset() -> None:
    got = algorithm(recipe="gspo", clip_high=0.1)
    assert (got.ratio, got.clip_low, got.clip_high) == ("sequence", 3e-4, 0.1)


def test_another_source_of_settings_may_still_choose_the_recipe() -> None:
    """A preset is not something that was set: laid over it, another recipe brings its own parts."""
    first = RunConfig.parse({"algorithm": {"recipe": "gspo", "clip_high": 0.1}})
    first.algorithm.recipe = "dr_grpo"
    assert first.algorithm == algorithm(recipe="dr_grpo", clip_high=0.1)
    passed = resolve(first, algorithm={"recipe": "sapo"}).algorithm
    assert passed == algorithm(recipe="sapo", clip_high=0.1)


@pytest.mark.parametrize("name", RECIPES)
def test_the_resolved_config_reads_back_as_itself(name: RecipeName) -> None:
    config = RunConfig.parse({"algorithm": {"recipe": name, "gamma": 0.5}})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("name", RECIPES)
def test_asynchronous_generation_needs_a_chosen_correction(name: RecipeName) -> None:
    def config(staleness: int, **chosen: Any) -> RunConfig:
        return RunConfig.parse(
            {"rollout": {"max_staleness": staleness}, "algorithm": {"recipe": name, **chosen}}
        )

    trainable(config(0))
    trainable(config(2, correction="none"))
    if "correction" in RECIPES[name].preset:
        trainable(config(2))
        return
    with pytest.raises(ConfigError) as caught:
        trainable(config(2))
    for word in ("max_staleness = 2", name, "truncate", "mask", "second_moment", "none", "token", "sequence"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (dict(proximal="reuse"), "nothing to act on"),
        (dict(recipe="m2po", proximal="loglinear"), "choose proximal recompute"),
        (dict(behaviour_weight_floor=2.0), "is not below"),
        (dict(recipe="dapo", correction="none", overlong_buffer=30000), "is longer than"),
    ],
)
def test_parts_that_cannot_go_together_are_a_sentence(parts: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        trainable(RunConfig.parse({"algorithm": parts}))


def test_the_document_holds_the_table() -> None:
    assert table() in DOCUMENT.read_text(), "run `python -m areal_agent.recipes docs/algorithms.md`"
