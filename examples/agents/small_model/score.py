"""How well a model does the task, without gateway or engine: the agent's loop, batched, greedy or sampled.

Only the warm start uses it, to know when to stop. The run itself scores the model through the real path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from calculator import MAX_TURNS, calculate, reward

from small_model.questions import Question
from small_model.transcripts import TOOL_FORMS, Renderer

MAX_NEW_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of all questions: answered right; and asked of the calculator exactly as they should be."""

    success: float
    tool: float


@torch.no_grad()
def score(
    model: Any, renderer: Renderer, questions: Sequence[Question], temperature: float = 0.0, seed: int = 0
) -> Score:
    """Play every question once; tool forms take turns. `temperature` 0 is greedy."""
    generator = torch.Generator().manual_seed(seed)
    messages = [[{"role": "user", "content": q.text}] for q in questions]
    live = list(range(len(questions)))
    success, tool = [0.0] * len(questions), [False] * len(questions)
    for _ in range(MAX_TURNS):
        if not live:
            break
        prompts = [renderer.prompt(messages[i], i % len(TOOL_FORMS)) for i in live]
        going_on = []
        for i, reply in zip(
            live, _generate(model, prompts, renderer.stop, temperature, generator), strict=True
        ):
            text, expression = renderer.parse(reply)
            if expression is None:
                success[i] = reward(questions[i].task, text)
                continue
            tool[i] = tool[i] or expression == questions[i].expression
            function = {"name": "calculator", "arguments": {"expression": expression}}
            messages[i] += [
                {
                    "role": "assistant",
                    "content": text,
                    "tool_calls": [{"type": "function", "function": function}],
                },
                {"role": "tool", "content": calculate(expression)},
            ]
            going_on.append(i)
        live = going_on
    return Score(sum(success) / len(questions), sum(tool) / len(questions))


def _generate(
    model: Any, prompts: list[list[int]], stop: int, temperature: float, generator: torch.Generator
) -> list[list[int]]:
    """Replies to prompts, left-padded into one batch; each ends with `stop` unless it was cut."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    attend = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attend[row, width - len(prompt) :] = 1
    positions = (attend.cumsum(1) - 1).clamp(min=0)
    cache, columns = None, []
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(MAX_NEW_TOKENS):
        out = model(
            input_ids=ids,
            attention_mask=attend,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, logits = out.past_key_values, out.logits[:, -1]
        if temperature:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        else:
            chosen = logits.argmax(-1)
        columns.append(torch.where(done, stop, chosen))
        done |= chosen == stop
        if bool(done.all()):
            break
        ids, positions = chosen[:, None], positions[:, -1:] + 1
        attend = torch.cat([attend, torch.ones_like(ids)], 1)
    replies = torch.stack(columns, 1).tolist()
    return [reply[: reply.index(stop) + 1] if stop in reply else reply for reply in replies]
