"""What comes again is tokenised once, what comes once takes no room, and the ids are always the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from areal_gateway import repeated_texts
from areal_gateway.repeated_texts import RepeatedTexts


class Counted:
    """Characters as ids; counts what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, text: str, special: bool) -> list[int]:
        self.asked.append(text)
        return [*([0] if special else []), *map(ord, text)]


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b" * 33, "c" * 500, "d" * 200_000]), st.booleans()), max_size=20
    )
)
def test_the_ids_are_those_of_tokenising(asked: list[tuple[str, bool]]) -> None:
    known = RepeatedTexts(Counted())
    for text, special in asked:
        ids = known.encode(text, special)
        assert ids == Counted()(text, special)
        ids.append(-1)  # the caller's own: nobody else may see this


def test_a_system_prompt_is_tokenised_twice_however_much_comes_between() -> None:
    encode = Counted()
    known = RepeatedTexts(encode)
    system = "You are an agent. " * 50
    for i in range(300):
        known.encode(system, False)
        for j in range(10):
            known.encode(f"the tool says {i} {j} " * 10, False)
    assert encode.asked.count(system) == 2  # the first time it was one of many
    assert len(encode.asked) == 3002


def test_texts_that_come_once_take_no_room() -> None:
    known = RepeatedTexts(Counted())
    for i in range(3 * repeated_texts.SEEN):
        known.encode(f"unlike any other: {i:040d}", False)
    assert known._long.cache_info().currsize == 0
    assert len(known._seen) == repeated_texts.SEEN
