"""Large bodies are read one at a time, in turn, and small requests are answered between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.proxy.http.bodies import MAX_UNORDERED_BYTES, RequestBodies
from tandem.runtime.tasks import LoopTurns
from tests.support.async_tests import in_no_time
from tests.support.http_listener import LIMIT_S, bodies, on_uvloop, play, respond, served
from tests.unit.proxy.http.test_bodies import feed

NUM_LARGE = 60
MAX_READ_BYTES = 320 * 1024
"""uvloop reads up to 256 KiB at once, and uvicorn adds them to up to 64 KiB that it has."""
LARGE = b"a" * 1_000_000
POST = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(LARGE)


def reader() -> ASGIApp:
    """Returns an application that answers with the size of the body."""
    received = RequestBodies(1 << 24, 30.0)

    async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
        async with received.receive(receive, Headers(scope=scope)) as body:
            size = len(body) if isinstance(body, bytes) else body.num_bytes
        await respond(send, b"%d" % size)

    return read_all


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
    read_all = reader()

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
    assert 0 < most <= 8 * MAX_READ_BYTES


@on_uvloop
async def test_clients_that_trickle_delay_no_other() -> None:
    async with served(reader()) as server:

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


@in_no_time
async def test_time_spent_waiting_for_a_turn_is_not_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow_turn(_: LoopTurns) -> None:
        await asyncio.sleep(60.0)

    monkeypatch.setattr(LoopTurns, "next", slow_turn)
    slow = RequestBodies(1 << 20, 30.0)
    piece = b"a" * (MAX_UNORDERED_BYTES // 2)
    async with slow.receive(feed([piece] * 4), Headers({"content-length": str(len(piece) * 4)})) as body:
        assert not isinstance(body, bytes) and body.num_bytes == len(piece) * 4
