"""Large bodies are read a few at a time, in turn, and small requests are answered between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.datastructures import Headers

import tandem.proxy.http.bodies
from tandem.proxy.http.bodies import MAX_LARGE_BODIES, MAX_UNORDERED_BYTES, RequestBodies
from tandem.proxy.http.turns import Turns
from tests.support.clocked_loop import run_in_no_time
from tests.support.http_listener import LIMIT_S, bodies, play, respond, served
from tests.unit.proxy.http.test_bodies import feed

NUM_LARGE = 60
MAX_TURNS = 2
MAX_READ_BYTES = 320 * 1024
"""uvloop reads up to 256 KiB at once, and uvicorn adds them to up to 64 KiB that it has."""
LARGE = b"a" * 1_000_000
POST = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(LARGE)


def run_turns(num_callers: int, num_turns: int, cancelled: int = 0) -> list[list[int]]:
    """Returns which callers got a turn in each iteration of the loop. The first callers are cancelled."""
    got: list[list[int]] = [[]]

    async def run() -> None:
        turns = Turns(MAX_TURNS)

        async def call(number: int) -> None:
            for _ in range(num_turns):
                await turns.turn()
                got[-1].append(number)

        async def count_iterations() -> None:
            while True:
                await asyncio.sleep(0)
                got.append([])

        counting = asyncio.create_task(count_iterations())
        callers = [asyncio.create_task(call(number)) for number in range(num_callers)]
        await asyncio.sleep(0)
        for caller in callers[:cancelled]:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        counting.cancel()

    asyncio.run(run())
    return [numbers for numbers in got if numbers]


def test_few_continue_in_one_iteration_and_each_as_often_as_the_others() -> None:
    rounds = run_turns(7, 6)
    assert max(map(len, rounds)) <= MAX_TURNS
    order = [number for numbers in rounds for number in numbers]
    assert order == list(range(7)) * 6


def test_a_cancelled_request_takes_no_turn() -> None:
    rounds = run_turns(7, 1, cancelled=5)
    assert rounds == [[5, 6]]


async def read_all(scope: dict[str, Any], receive: Any, send: Any) -> None:
    async with BODIES.receive(receive, Headers(scope=scope)) as body:
        size = len(body) if isinstance(body, bytes) else body.num_bytes
    await respond(send, b"%d" % size)


BODIES = RequestBodies(1 << 24, 30.0)


async def post_all(port: int, num_clients: int) -> set[bytes]:
    """Returns the answers to large bodies that are sent at once."""

    async def post() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + LARGE)
        answer = await reader.read()
        writer.close()
        return bodies(answer)[0]

    return set(await asyncio.gather(*(post() for _ in range(num_clients))))


def test_of_a_storm_of_large_bodies_little_is_read_in_one_iteration_of_the_loop() -> None:
    num_bytes, most, is_measuring = 0, 0, True

    def next_iteration() -> None:
        nonlocal num_bytes, most
        most, num_bytes = max(most, num_bytes), 0
        if is_measuring:
            asyncio.get_running_loop().call_soon(next_iteration)

    async def count_and_read(scope: dict[str, Any], receive: Any, send: Any) -> None:
        async def counted() -> Any:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message["body"])
            return message

        await read_all(scope, counted, send)

    async def test() -> None:
        nonlocal is_measuring
        async with served(count_and_read) as server:
            next_iteration()
            found = await asyncio.to_thread(lambda: asyncio.run(post_all(server.port, NUM_LARGE)))
            is_measuring = False
            assert found == {b"%d" % len(LARGE)}

    play(test)
    # Clients that were late may have their data read together; without turns it is 13 MB.
    assert 0 < most <= 8 * MAX_LARGE_BODIES * MAX_READ_BYTES


def test_clients_that_trickle_delay_no_other() -> None:
    async def test() -> None:
        async with served(read_all) as server:

            async def trickle() -> None:
                _, writer = await server.connect()
                writer.write(POST + b"a" * 100_000)
                try:
                    while True:
                        await asyncio.sleep(0.01)
                        writer.write(b"a")
                finally:
                    writer.close()

            trickling = [asyncio.create_task(trickle()) for _ in range(50)]
            await asyncio.sleep(0.1)
            async with asyncio.timeout(LIMIT_S / 4):
                assert await post_all(server.port, 4) == {b"%d" % len(LARGE)}
            for task in trickling:
                task.cancel()
            await asyncio.gather(*trickling, return_exceptions=True)

    play(test)


def test_time_spent_waiting_for_a_turn_is_not_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowTurns(Turns):
        async def turn(self) -> None:
            await asyncio.sleep(60.0)

    monkeypatch.setattr(tandem.proxy.http.bodies, "Turns", SlowTurns)
    slow = RequestBodies(1 << 20, 30.0)
    piece = b"a" * (MAX_UNORDERED_BYTES // 2)

    async def run() -> None:
        async with slow.receive(feed([piece] * 4), Headers({"content-length": str(len(piece) * 4)})) as body:
            assert not isinstance(body, bytes) and body.num_bytes == len(piece) * 4

    run_in_no_time(run())
