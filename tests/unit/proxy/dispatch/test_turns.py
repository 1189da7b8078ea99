"""Work for many streams is spread over iterations of the loop, in order, and a cancelled caller costs nobody a turn."""

from __future__ import annotations

import asyncio
from typing import cast

from tandem.proxy.dispatch.pauses import Pauses
from tandem.proxy.dispatch.turns import Turns


def test_so_many_per_iteration_in_order() -> None:
    async def run() -> None:
        turns, went = Turns(3), list[int]()

        async def work(number: int) -> None:
            await turns.take()
            went.append(number)

        tasks = [asyncio.create_task(work(number)) for number in range(10)]
        tasks[5].cancel()
        seen = []
        while len(went) < 9:
            await asyncio.sleep(0)
            seen.append(len(went))
        assert went == [0, 1, 2, 3, 4, 6, 7, 8, 9]
        assert all(after - before <= 3 for before, after in zip([0, *seen], seen, strict=False))
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_a_caller_that_is_cancelled_while_it_waits() -> None:
    async def run() -> None:
        turns = Turns(1)
        await turns.take()
        waiting = [asyncio.create_task(turns.take()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait_for(asyncio.gather(*waiting[1:]), 5)

    asyncio.run(run())


def test_nothing_is_scheduled_when_nobody_comes() -> None:
    async def run() -> None:
        turns = Turns(2)
        await turns.take()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not turns._is_scheduled
        await turns.take()

    asyncio.run(run())


def test_waiters_are_woken_in_the_same_order_as_callers() -> None:
    async def run() -> None:
        turns, went = Turns(1), list[str]()

        async def wait(name: str, waiter: asyncio.Future[None]) -> None:
            await waiter
            went.append(name)

        waiters = {name: asyncio.get_running_loop().create_future() for name in "abc"}
        tasks = {name: asyncio.create_task(wait(name, waiter)) for name, waiter in waiters.items()}
        await asyncio.sleep(0)
        tasks["b"].cancel()
        for waiter in waiters.values():
            turns.wake(waiter)
        await turns.take()
        assert went == ["a", "c"]
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    asyncio.run(run())


def test_the_loop_may_pause_while_callers_wait_and_not_else() -> None:
    class Counted:
        num_calls = 0

        def pause_if_due(self) -> None:
            self.num_calls += 1

    async def test() -> None:
        pauses = Counted()
        turns = Turns(1, cast(Pauses, pauses))
        await turns.take()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert pauses.num_calls == 0
        await asyncio.gather(*(turns.take() for _ in range(4)))
        assert pauses.num_calls == 3  # once before each iteration that had one to let go on

    asyncio.run(test())
