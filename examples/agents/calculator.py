"""An agent that answers word-like arithmetic questions with a calculator, and how it is trained.

The upper half is a plain program on the `openai` SDK: it knows nothing of training. The lower half says
what a good answer is and which tasks to learn on.

    areal-agent train examples/agents/calculator.py       or       python examples/agents/calculator.py
"""

from __future__ import annotations

import ast
import functools
import json
import operator
import re
from typing import Any

from openai import AsyncOpenAI

# ---------------------------------------------------------------- the agent

MAX_TURNS = 4

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute a sum.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> str:
    """The value of an expression of integers, `+`, `-`, `*` and brackets, or a sentence that says what is wrong."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError("only integers, +, - and * can be computed")

    try:
        if not re.fullmatch(
            r"[0-9+\-*() ]{1,64}", expression
        ):  # the length bounds depth and size of a result
            raise ValueError("only integers, +, - and * can be computed, in at most 64 characters")
        if not re.fullmatch(r"[\d\s()*+-]*", expression, re.ASCII):
            raise ValueError("only integers, +, - and * can be computed")
        return str(value(ast.parse(expression.strip(), mode="eval").body))
    except (ValueError, SyntaxError) as e:
        return f"error: {getattr(e, 'msg', e)}"


def use_tool(arguments: str) -> str:
    """What the tool answers to a model's arguments, whatever they are."""
    try:
        expression = json.loads(arguments)["expression"]
    except (ValueError, KeyError, TypeError):
        expression = None
    return calculate(expression) if isinstance(expression, str) else "error: give an expression"


@functools.cache
def client() -> AsyncOpenAI:
    return AsyncOpenAI()


async def agent(task: dict[str, Any]) -> str | None:
    """{"question"} -> the answer as text; None when the model never came to one."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(MAX_TURNS):
        response = await client().chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = response.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            answer = use_tool(call.function.arguments) if call.type == "function" else "error: unknown tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    return None


# ---------------------------------------------------------------- its training


def reward(task: dict[str, Any], result: str | None) -> float:
    """1 where the last number of the answer is the right one."""
    numbers = re.findall(r"-?\d+", result or "")
    return float(bool(numbers) and int(numbers[-1]) == task["answer"])


def dataset() -> list[dict[str, Any]]:
    """Tasks to learn on."""
    from small_model.questions import distinct

    return [question.task for question in distinct("train", 4000)]


def eval_dataset() -> list[dict[str, Any]]:
    """Held-out tasks: no sum of theirs occurs in training or in the warm start."""
    from small_model.questions import distinct

    return [question.task for question in distinct("heldout", 256)]


def model() -> str:
    """Folder of the small model to start from, made on first use: see docs/small_model.md."""
    from small_model import build

    return str(build())


if __name__ == "__main__":
    import areal_agent

    areal_agent.train(agent, reward, dataset=dataset(), eval_dataset=eval_dataset(), model=model())
