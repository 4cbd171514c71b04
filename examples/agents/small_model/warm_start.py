"""The warm start: tokenizer and blank Qwen3, then two supervised phases by the trainer's own `train_sft`.

1. Clean transcripts, until the model solves nearly every unseen question.
2. A few mediocre ones: most guess or take the wrong operator. The model still knows how, but mostly does
   not: this is what RL is given to repair.

Each phase is counted in steps and judged by a score, never by a clock, so that a slow machine makes the
same model. Invariant: `make` returns a folder only for a model within the bounds of its recipe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from areal_agent.config import TrainerConfig
from areal_agent.errors import ArealError
from areal_trainers.sft import SftStep, train_sft
from small_model.questions import Question, distinct, questions
from small_model.score import Score, score
from small_model.tokenizer import train_tokenizer
from small_model.transcripts import Kind, Renderer, tokenizer_texts, transcripts

CLEAN: Mapping[Kind, float] = {"right": 1.0}
MEDIOCRE: Mapping[Kind, float] = {"guess": 0.60, "wrong_operator": 0.20, "right": 0.20}


@dataclass(frozen=True)
class Recipe:
    """How the starting model is made. Steps are of `batch_tokens` tokens, prompts included."""

    vocab_size: int = 1024
    hidden_size: int = 128
    rope_theta: float = 10000.0
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    # The usual 0.02 is meant for wide models. At this width copying a number, which all else hangs on,
    # then takes 600 steps to appear; with 0.06 it takes 100.
    initializer_range: float = 0.06
    batch_tokens: int = 1600
    clean_steps: int = 400
    clean_rate: float = 1.5e-3
    more_steps: int = 200
    more_rounds: int = 4
    clean_success: float = 0.95
    mediocre_steps: int = 80
    mediocre_rate: float = 5e-4
    warmup_steps: int = 30
    judged_on: int = 128
    greedy_most: float = 0.35
    sampled_least: float = 0.04
    mix: Mapping[Kind, float] = field(default_factory=lambda: dict(MEDIOCRE))


RECIPE = Recipe()

ATTEMPTS = 3
"""Seeds tried. Models of other machines differ in the last digits, and with them in luck."""


class WarmStartFailed(ArealError):
    """The model came out outside the bounds of its recipe."""


def make(scratch: Path, recipe: Recipe, seed: int, say: Callable[[str], None]) -> Path:
    """Make the model under `scratch` and return its folder. Raises WarmStartFailed, or train_sft's errors."""
    start = time.monotonic()

    def note(line: str) -> None:
        say(f"[{time.monotonic() - start:5.1f} s] {line}")

    folder = blank(scratch / "blank", recipe, seed)
    unseen = distinct(
        "train", recipe.judged_on, seed=seed + 1
    )  # judges the phases; the held-out share stays untouched
    note("clean transcripts: learning the format, the operators, and to copy numbers")
    folder = _phase(
        folder, scratch / "clean-0", recipe, CLEAN, recipe.clean_steps, recipe.clean_rate, seed, note
    )
    for extra in range(recipe.more_rounds + 1):
        knows = measure(folder, unseen)
        note(f"on unseen questions it asks the right sum {knows.tool:.2f}, solves {knows.success:.2f}")
        if knows.success >= recipe.clean_success:
            break
        if extra == recipe.more_rounds:
            raise WarmStartFailed(
                f"after {recipe.clean_steps + extra * recipe.more_steps} clean steps the model solves "
                f"{knows.success:.2f} of unseen questions; the recipe wants {recipe.clean_success:.2f}"
            )
        to = scratch / f"clean-{extra + 1}"
        folder = _phase(
            folder, to, recipe, CLEAN, recipe.more_steps, recipe.clean_rate, seed + extra + 1, note
        )
    note("mediocre transcripts: guesses, wrong operators")
    to = scratch / "start"
    folder = _phase(
        folder, to, recipe, recipe.mix, recipe.mediocre_steps, recipe.mediocre_rate, seed + 100, note
    )
    greedy, sampled = measure(folder, unseen), measure(folder, unseen, temperature=1.0)
    note(f"starting model: solves {greedy.success:.2f} greedily, {sampled.success:.2f} sampled")
    if greedy.success > recipe.greedy_most or sampled.success < recipe.sampled_least:
        raise WarmStartFailed(
            f"the starting model solves {greedy.success:.2f} greedily and {sampled.success:.2f} sampled; the recipe "
            f"wants at most {recipe.greedy_most:.2f} and at least {recipe.sampled_least:.2f}"
        )
    return folder


def make_reliably(scratch: Path, recipe: Recipe, seed: int, say: Callable[[str], None]) -> Path:
    """`make`, with other seeds when one comes out outside the bounds. Raises the last seed's WarmStartFailed."""
    for attempt in range(ATTEMPTS):
        try:
            return make(scratch / f"attempt-{attempt}", recipe, seed + 1000 * attempt, say)
        except WarmStartFailed as e:
            if attempt == ATTEMPTS - 1:
                raise
            say(f"{e}; trying another seed")
    raise AssertionError("unreachable")


def blank(folder: Path, recipe: Recipe, seed: int) -> Path:
    """A Qwen3 with random weights and the tokenizer trained for the task, as a Hugging Face folder."""
    tokenizer: Any = train_tokenizer(tokenizer_texts(seed), recipe.vocab_size)
    end, pad = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|endoftext|>")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=3 * recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden_size // recipe.heads,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=pad,
        eos_token_id=end,
        pad_token_id=pad,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def measure(folder: Path, unseen: list[Question], temperature: float = 0.0) -> Score:
    """Score the model in a folder."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return score(model.eval(), Renderer(tokenizer), unseen, temperature)


def _phase(
    source: Path,
    to: Path,
    recipe: Recipe,
    mix: Mapping[Kind, float],
    steps: int,
    rate: float,
    seed: int,
    note: Callable[[str], None],
) -> Path:
    renderer = Renderer(AutoTokenizer.from_pretrained(source, local_files_only=True))
    stream = transcripts(renderer, questions("warm", seed), mix, seed)
    examples = [(t.token_ids, t.loss_mask) for t in islice(stream, steps * recipe.batch_tokens // 90)]

    def show(step: SftStep) -> None:
        if step.step % 50 == 0:
            note(f"step {step.step:4d}/{steps}  loss {step.loss:.3f}")

    result = train_sft(
        source,
        to,
        examples,
        TrainerConfig(
            steps=steps,
            microbatch_tokens=recipe.batch_tokens,
            learning_rate=rate,
            warmup_steps=min(recipe.warmup_steps, steps // 4),
            seed=seed,
            platform="cpu",
        ),
        batch_tokens=recipe.batch_tokens,
        decay=True,
        on_step=show,
    )
    note(f"{result.steps} steps, {result.tokens_per_s:.0f} tokens/s, loss {result.loss:.3f}")
    return result.model
