"""Word-like arithmetic questions, in three shares that have no question in common.

Invariant: a question's share is a function of its operator and its two numbers, so two shares never
hold the same sum, whatever the wording: `warm` feeds the supervised warm start, `train` the RL run,
`heldout` the evaluation.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Share = Literal["warm", "train", "heldout"]

NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Mia", "Sam", "Zoe")
THINGS = ("pens", "eggs", "cards", "books", "coins", "apples", "shells", "stamps")

# {n} a name, {t} a thing; {a} and {b} the numbers, which the expression takes in the same order.
TEMPLATES: dict[str, tuple[str, ...]] = {
    "+": (
        "{n} has {a} {t} and gets {b} more. How many {t} now?",
        "{n} finds {a} {t} today and {b} on Sunday. How many in all?",
        "There are {a} red and {b} blue {t}. How many {t} in all?",
    ),
    "-": (
        "{n} has {a} {t} and loses {b}. How many {t} are left?",
        "{n} had {a} {t} and gave away {b}. How many are left?",
        "Of {a} {t}, {b} are broken. How many are not?",
    ),
    "*": (
        "{n} has {a} boxes of {b} {t}. How many {t} is that?",
        "Each of {a} bags holds {b} {t}. How many {t}?",
        "{n} buys {a} {t} a day for {b} days. How many {t}?",
    ),
}

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}

# Small enough that no result has more than three digits: copying longer numbers takes a larger model longer.
_RANGES = {"+": ((10, 499), (10, 499)), "-": ((100, 999), (10, 99)), "*": ((11, 99), (3, 9))}


@dataclass(frozen=True, slots=True)
class Question:
    """One question and what it takes to answer it."""

    text: str
    op: str
    a: int
    b: int

    @property
    def expression(self) -> str:
        """What the calculator has to be asked, such as `37*12`."""
        return f"{self.a}{self.op}{self.b}"

    @property
    def answer(self) -> int:
        return OPERATIONS[self.op](self.a, self.b)

    @property
    def task(self) -> dict[str, object]:
        """The item of a data set: what the agent gets, and the answer that only the reward reads."""
        return {"question": self.text, "answer": self.answer}


def share_of(op: str, a: int, b: int) -> Share:
    """Which share a sum belongs to: 30 % warm, 55 % train, 15 % heldout. `3+5` and `5+3` go together."""
    low, high = sorted((a, b))
    bucket = hashlib.blake2b(f"{op} {low} {high}".encode(), digest_size=2).digest()
    percent = int.from_bytes(bucket, "big") * 100 >> 16
    return "warm" if percent < 30 else "train" if percent < 85 else "heldout"


def questions(share: Share, seed: int) -> Iterator[Question]:
    """Endless questions of a share, operators and wordings mixed evenly; the same for the same seed."""
    rng = random.Random(f"{share}/{seed}")
    while True:
        op = rng.choice(tuple(TEMPLATES))
        (a_low, a_high), (b_low, b_high) = _RANGES[op]
        a, b = rng.randint(a_low, a_high), rng.randint(b_low, b_high)
        template = rng.choice(TEMPLATES[op])
        name, thing = rng.choice(NAMES), rng.choice(THINGS)
        if share_of(op, a, b) == share:
            yield Question(template.format(n=name, t=thing, a=a, b=b), op, a, b)


def distinct(share: Share, count: int, seed: int = 0) -> list[Question]:
    """`count` questions of a share, no text twice."""
    found: dict[str, Question] = {}
    for question in questions(share, seed):
        found.setdefault(question.text, question)
        if len(found) == count:
            break
    return list(found.values())
