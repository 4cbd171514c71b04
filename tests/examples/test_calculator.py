"""The calculator computes sums and nothing else; the agent loops over tool calls; the reward reads the answer."""

import json

import calculator
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

operands = st.integers(0, 9999)


@given(a=operands, b=operands, op=st.sampled_from("+-*"))
def test_it_computes(a, b, op):
    oracle = {"+": a + b, "-": a - b, "*": a * b}[op]
    assert calculator.calculate(f"{a}{op}{b}") == str(oracle)
    assert calculator.calculate(f" {a} {op} {b} ") == str(oracle)


def test_it_knows_precedence_and_brackets():
    assert calculator.calculate("2+3*4") == "14"
    assert calculator.calculate("-(2+3)*4") == "-20"


@pytest.mark.parametrize(
    "expression",
    ["", "2+", "9**9**9", "1/0", "a+1", "True+1", "__import__('os').getpid()", "(1).real", "[1]*9", "1.5+1",
     "1" * 65, "(" * 60, "12abc", "5(3)", "1\n", "٣+1", "1<<9", "'a'*9", "\0", "1;2", "x:=1", "lambda: 1", "0x"],
)  # fmt: skip
@pytest.mark.filterwarnings("error")  # a warning of Python's parser would reach the user's terminal
def test_whatever_is_no_sum_is_answered_with_a_sentence(expression):
    assert calculator.calculate(expression).startswith("error: ")


@given(st.text(max_size=80))
def test_no_text_makes_it_raise_or_run_long(expression):
    answer = calculator.calculate(expression)
    assert answer.startswith("error: ") or int(answer) is not None


@given(st.text(max_size=40) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_no_tool_arguments_make_it_raise(arguments):
    assert isinstance(calculator.use_tool(arguments), str)


@pytest.mark.parametrize(
    ("result", "expected"),
    [("The answer is 12.", 1.0), ("12", 1.0), ("3 and 4 make 12", 1.0), ("The answer is 13.", 0.0),
     ("12 or 13", 0.0), ("The answer is -12.", 0.0), ("", 0.0), (None, 0.0), ("twelve", 0.0)],
)  # fmt: skip
def test_the_reward_reads_the_last_number(result, expected):
    assert calculator.reward({"question": "", "answer": 12}, result) == expected


class Scripted:
    """Stands where the SDK's client does: plays replies in order, keeps what it was sent."""

    def __init__(self, *replies):
        self.replies, self.sent = list(replies), []
        self.chat = self.completions = self

    async def create(self, **request):
        self.sent.append(json.loads(json.dumps(request)))
        message = {"role": "assistant", **self.replies.pop(0)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return ChatCompletion.model_validate(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )


def tool_call(expression):
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


async def test_the_agent_uses_the_tool_for_as_many_turns_as_it_needs(monkeypatch):
    script = Scripted(tool_call("2+3"), tool_call("5*2"), {"content": "The answer is 10."})
    monkeypatch.setattr(calculator, "client", lambda: script)
    assert await calculator.agent({"question": "?", "answer": 10}) == "The answer is 10."
    assert [m["content"] for m in script.sent[-1]["messages"] if m["role"] == "tool"] == ["5", "10"]


async def test_the_agent_gives_up_on_a_model_that_never_answers(monkeypatch):
    script = Scripted(*[tool_call("1+1")] * 50)
    monkeypatch.setattr(calculator, "client", lambda: script)
    assert await calculator.agent({"question": "?", "answer": 2}) is None
    assert len(script.sent) == calculator.MAX_TURNS


async def test_the_model_never_sees_the_answer(monkeypatch):
    script = Scripted({"content": "1"})
    monkeypatch.setattr(calculator, "client", lambda: script)
    await calculator.agent({"question": "How many?", "answer": 987654})
    assert "987654" not in json.dumps(script.sent)
