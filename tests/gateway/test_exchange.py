"""Whoever listens hears everything, in order, whatever comes while it passes something on."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from areal_gateway.exchange import CallRequest, Exchange, Said
from areal_gateway.reply import Delta


def exchange() -> Exchange:
    return Exchange(None, CallRequest("chat.completions", "", []), b"", None)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=6), slow=st.integers(0, 3))
def test_a_listener_hears_everything_once_and_the_rest_in_one_list(
    steps: list[tuple[int, int]], slow: int
) -> None:
    """`steps`: how much is said at once, then passes of the loop; `slow`: passes that each telling takes."""

    async def main() -> tuple[list[str], list[tuple[list[Said], bool]]]:
        told = exchange()
        said: list[str] = []
        heard: list[tuple[list[Said], bool]] = []

        async def listen() -> None:
            async for fresh in told.listen(60):
                heard.append((fresh, told.finished))
                for _ in range(slow):
                    await asyncio.sleep(0)

        with told.subscribed(patient=False):
            listening = asyncio.create_task(listen())
            for several, passes in steps:
                for _ in range(several):
                    said.append(str(len(said)))
                    told.say(Said(0, Delta(content=said[-1])))
                for _ in range(passes):
                    await asyncio.sleep(0)
            told.end(None)
            await asyncio.wait_for(listening, 5)
        return said, heard

    said, heard = asyncio.run(main())
    assert [s.delta.content for fresh, _ in heard for s in fresh if s.delta] == said
    assert sum(after for _, after in heard) <= 1


async def test_silence_is_an_empty_list() -> None:
    told = exchange()
    heard: list[Any] = []
    with told.subscribed(patient=False):
        listening = told.listen(0.01)
        heard.append(await anext(listening))
        told.say(Said(0, Delta(content="x")))
        heard.append(await anext(listening))
        await listening.aclose()  # type: ignore[attr-defined]
        told.finished = True
    assert heard == [[], [Said(0, Delta(content="x"))]]
