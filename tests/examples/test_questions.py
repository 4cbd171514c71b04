"""The three shares of questions have no sum in common, and every answer is what the wording says."""

import re
from itertools import islice

import calculator
from hypothesis import given
from hypothesis import strategies as st
from small_model.questions import OPERATIONS, TEMPLATES, distinct, questions, share_of

numbers = st.integers(0, 10**6)


def sums(share: str, count: int) -> set[tuple[str, int, int]]:
    return {(q.op, *sorted((q.a, q.b))) for q in islice(questions(share, seed=0), count)}  # type: ignore[arg-type]


def test_no_sum_is_in_two_shares():
    warm, train, heldout = (sums(s, 20_000) for s in ("warm", "train", "heldout"))
    assert min(map(len, (warm, train, heldout))) > 3000
    assert not warm & train
    assert not warm & heldout
    assert not train & heldout


@given(op=st.sampled_from(sorted(OPERATIONS)), a=numbers, b=numbers)
def test_swapping_the_numbers_does_not_change_the_share(op, a, b):
    assert share_of(op, a, b) == share_of(op, b, a)


def test_the_data_sets_hold_enough_tasks_and_no_question_twice():
    train, heldout = calculator.dataset(), calculator.eval_dataset()
    texts = [task["question"] for task in train + heldout]
    assert len(heldout) >= 200
    assert len(train) >= 640  # 40 steps of 16 tasks without a repeat
    assert len(texts) == len(set(texts))
    warm = {q.text for q in islice(questions("warm", seed=0), 20_000)}
    assert not warm & set(texts)


def test_a_seed_gives_the_same_questions_again():
    assert distinct("train", 50, seed=3) == distinct("train", 50, seed=3)
    assert distinct("train", 50, seed=3) != distinct("train", 50, seed=4)


def test_the_answer_follows_from_the_text_alone():
    """An independent reading: the wording decides the operation, the numbers stand in the text."""
    words = {"+": ("more", "in all"), "-": ("left", "not?"), "*": ("boxes", "bags", "a day")}
    for q in islice(questions("train", seed=1), 500):
        (op,) = [op for op, cues in words.items() if any(cue in q.text for cue in cues)]
        found = [int(n) for n in re.findall(r"\d+", q.text)]
        assert sorted(found) == sorted((q.a, q.b))
        assert q.op == op
        assert q.answer == {"+": sum(found), "-": max(found) - min(found), "*": found[0] * found[1]}[op]


def test_every_operator_has_several_wordings():
    assert all(len(wordings) >= 3 for wordings in TEMPLATES.values())
