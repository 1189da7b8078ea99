"""Whole answers that clients do not read cost a limited memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from tandem.proxy.http.starlette_app import ApiRoute, starlette_app
from tandem.proxy.http.whole_answers import WholeAnswers
from tandem.runtime.errors import Overloaded
from tests.support.http_listener import GET, LAST_GET, bodies, play, served, until

SIZE = 8_000_000


def app_with(answers: WholeAnswers) -> Any:
    async def handler(request: Request) -> Response:
        return answers.json(request, b"a" * SIZE)

    return starlette_app([ApiRoute("GET", "/", handler)], None)


def test_a_whole_answer_waits_outside_the_transport() -> None:
    answers = WholeAnswers()

    async def test() -> None:
        async with served(app_with(answers)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
            writer.write(GET)
            await until(lambda: answers.num_bytes == SIZE)
            await asyncio.sleep(0.2)
            [connection] = server.listener._server.server_state.connections
            assert connection.transport._transport.get_write_buffer_size() < 200_000
            writer.write(LAST_GET)
            first, second = bodies(await reader.read())
            assert len(first) == len(second) == SIZE, "both are complete for a client that reads"
            await until(lambda: answers.num_bytes == 0)
            writer.close()

    play(test)


def test_an_answer_beyond_the_limit_is_refused_before_it_begins() -> None:
    answers = WholeAnswers(3 * SIZE)  # half of it is for one client

    async def test() -> None:
        async with served(app_with(answers)) as server:
            _, silent = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
            silent.write(GET)
            await until(lambda: answers.num_bytes == SIZE)
            refusal = await server.exchange(LAST_GET)
            assert refusal.startswith(b"HTTP/1.1 503 ") and b"unread answers" in refusal
            silent.transport.abort()
            await until(lambda: answers.num_bytes == 0)
            assert len(bodies(await server.exchange(LAST_GET))[0]) == SIZE

    play(test)


def test_one_client_cannot_use_all_of_it() -> None:
    answers = WholeAnswers(100)
    with answers.hold("a", 50):
        with pytest.raises(Overloaded, match="your"), answers.hold("a", 1):
            pass
        with answers.hold("b", 50), pytest.raises(Overloaded, match="all"), answers.hold("c", 1):
            pass
    assert answers.num_bytes == 0 and not answers._by_client
