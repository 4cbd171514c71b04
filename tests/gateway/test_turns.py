"""A few stretches of work a pass of the event loop, in the order of asking, and nobody waits for one who left."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from areal_gateway.turns import A_PASS, PASS_S, Turns


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


async def test_of_many_a_few_go_on_in_each_pass_in_the_order_of_asking() -> None:
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
    assert max(Counter(at for at, _ in went).values()) == A_PASS
    assert passes <= 3 * 50 / A_PASS


async def test_those_who_leave_are_passed_over() -> None:
    turns, went = Turns(), []

    async def work(i: int) -> None:
        await turns.turn()
        went.append(i)

    tasks = [asyncio.create_task(work(i)) for i in range(3 * A_PASS)]
    await asyncio.sleep(0)
    leave = range(A_PASS, 2 * A_PASS + 1)
    for left in leave:
        tasks[left].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert went == [i for i in range(3 * A_PASS) if i not in leave]
    await asyncio.wait_for(turns.turn(), 5)


async def test_a_pass_ends_with_its_time_and_those_left_over_are_the_first_of_the_next() -> None:
    turns, passes, went = Turns(), 0, []

    async def work(i: int) -> None:
        await turns.turn()
        went.append((passes, i))
        busy_until = time.perf_counter() + (PASS_S if i < 20 else 0)
        while time.perf_counter() < busy_until:
            pass

    tasks = [asyncio.create_task(work(i)) for i in range(40)]
    tasks[2].cancel()
    while len(went) < 39:
        await asyncio.sleep(0)
        passes += 1
        assert passes < 200
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [i for _, i in went] == [i for i in range(40) if i != 2]
    in_pass = Counter(at for at, i in went if i < 20)
    assert max(in_pass.values()) == 1
    assert max(Counter(at for at, _ in went).values()) <= A_PASS
