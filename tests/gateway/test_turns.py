"""One stretch of work a pass of the event loop, in the order of asking, and nobody waits for one who left."""

from __future__ import annotations

import asyncio

from areal_gateway.turns import Turns


async def test_with_nobody_before_it_one_goes_on_at_once() -> None:
    turns = Turns()
    for _ in range(3):
        asked = turns.turn()
        try:
            asked.send(None)
        except StopIteration:  # it ended without waiting
            pass
        else:
            raise AssertionError("it waits, and there is nobody to wait for")
        await asyncio.sleep(0)  # the pass of the loop is over


async def test_of_many_one_goes_on_in_each_pass_in_the_order_of_asking() -> None:
    turns, passes, went = Turns(), 0, []

    async def work(i: int) -> None:
        await turns.turn()
        went.append((passes, i))

    tasks = [asyncio.create_task(work(i)) for i in range(50)]
    while len(went) < 50:
        await asyncio.sleep(0)
        passes += 1
        assert passes < 200
    await asyncio.gather(*tasks)
    assert [i for _, i in went] == list(range(50))
    assert len({at for at, _ in went}) == 50


async def test_those_who_leave_are_passed_over() -> None:
    turns, went = Turns(), []

    async def work(i: int) -> None:
        await turns.turn()
        went.append(i)

    tasks = [asyncio.create_task(work(i)) for i in range(6)]
    await asyncio.sleep(0)
    for left in (1, 2, 5):
        tasks[left].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert went == [0, 3, 4]
    await asyncio.wait_for(turns.turn(), 5)
