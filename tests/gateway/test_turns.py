"""A few stretches of work a pass of the event loop, in the order of asking, and nobody waits for one who left."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from areal_gateway.turns import A_PASS, PASS_S, Turns, turns


def compute(seconds: float) -> None:
    """A stretch of work."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


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
        compute(PASS_S if i < 20 else 0)

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


async def test_nobody_overtakes_one_whose_turn_it_is() -> None:
    """Not even in every pass, with a stretch that leaves no time: the one that waits goes on after the next."""
    turns, went = Turns(), []
    stop = False

    async def busy() -> None:
        while not stop and len(went) < 50:
            await turns.turn()
            went.append("busy")
            compute(1.25 * PASS_S)
            await asyncio.sleep(0)

    async def waits() -> None:
        await turns.turn()
        went.append("waits")

    working = asyncio.create_task(busy())
    await asyncio.sleep(0)
    await asyncio.create_task(waits())
    stop = True
    await working
    assert went.index("waits") <= 2


async def test_one_who_leaves_when_it_is_his_turn_blocks_nobody() -> None:
    turns = Turns()
    tasks = [asyncio.create_task(turns.turn()) for _ in range(A_PASS + 1)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the last has its turn now, and has not gone on yet
    tasks[-1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(3):
        await asyncio.wait_for(turns.turn(), 5)


async def test_all_on_one_loop_share_its_turns() -> None:
    assert turns() is turns()
    assert await asyncio.to_thread(asyncio.run, _turns()) is not turns()


async def _turns() -> Turns:
    return turns()
