"""Whole answers that clients do not read wait outside of the transport and are counted until they are sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tandem.proxy.admission.admission import ClientLimitExceeded, QueueFull
from tandem.proxy.admission.budgets import UNCOUNTED_BYTES, AnswerBudget, HeldAnswer
from tandem.proxy.answers.http_answers import WholeAnswer
from tandem.proxy.http.starlette_app import ApiRoute, client_of, starlette_app
from tests.support.http_listener import GET, LAST_GET, bodies, play, served
from tests.support.waiting import until

SIZE = 8_000_000


def app_with(budget: AnswerBudget) -> ASGIApp:
    async def handler(request: Request) -> Response:
        held = HeldAnswer(budget, client_of(request))
        held.grow(SIZE)
        return WholeAnswer([b"a" * SIZE], {}, held.release)

    return starlette_app([ApiRoute("GET", "/", handler)], None, budget)


def test_a_whole_answer_waits_outside_the_transport() -> None:
    async def test() -> None:
        budget = AnswerBudget()
        async with served(app_with(budget)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
            writer.write(GET)
            await until(lambda: budget.num_held == SIZE - UNCOUNTED_BYTES)
            await asyncio.sleep(0.2)
            connection: Any
            [connection] = server.listener._server.server_state.connections
            assert connection.transport._transport.get_write_buffer_size() < 200_000
            writer.write(LAST_GET)
            first, second = bodies(await reader.read())
            assert len(first) == len(second) == SIZE, "both are complete for a client that reads"
            await until(lambda: budget.num_held == 0)
            writer.close()

    play(test)


def test_a_client_that_disconnects_releases_its_answer() -> None:
    async def test() -> None:
        budget = AnswerBudget(max_held_bytes=3 * SIZE)  # half of it is for one client
        async with served(app_with(budget)) as server:
            _, silent = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
            silent.write(GET)
            await until(lambda: budget.num_held > 0)
            refusal = await server.exchange(LAST_GET)
            assert refusal.startswith(b"HTTP/1.1 429 ") and b"Your answers" in refusal
            silent.transport.abort()
            await until(lambda: budget.num_held == 0)
            assert len(bodies(await server.exchange(LAST_GET))[0]) == SIZE

    play(test)


def test_no_route_can_forget_to_count() -> None:
    """40 unread answers of stored responses, with 15.5 MB each, took 840 MB: their route did not count them."""

    async def forgets(request: Request) -> Response:
        return Response(b"a" * SIZE, headers={"x-own": "1"}, media_type="text/plain", status_code=201)

    async def test() -> None:
        budget = AnswerBudget(max_held_bytes=4 * SIZE)
        async with served(starlette_app([ApiRoute("GET", "/", forgets)], None, budget)) as server:
            silent = [await asyncio.open_connection("127.0.0.1", server.port, limit=1024) for _ in range(5)]
            for number, (_, writer) in enumerate(silent[:2], start=1):
                writer.write(GET)
                expected = number * (SIZE - UNCOUNTED_BYTES)
                await until(lambda expected=expected: budget.num_held == expected)
            for _ in range(3):
                assert (await server.exchange(LAST_GET)).startswith(b"HTTP/1.1 429 ")
            for _, writer in silent:
                writer.transport.abort()
            await until(lambda: budget.num_held == 0)
            answer = await server.exchange(LAST_GET)
            assert answer.startswith(b"HTTP/1.1 201 ") and b"x-own: 1" in answer and b"text/plain" in answer
            assert bodies(answer) == [b"a" * SIZE]

    play(test)


def test_one_client_cannot_use_all_of_it() -> None:
    async def test() -> None:
        budget = AnswerBudget(max_held_bytes=100)
        budget.take("a", 50)
        with pytest.raises(ClientLimitExceeded, match="Your answers"):
            budget.take("a", 1)
        budget.take("b", 50)
        with pytest.raises(QueueFull, match="all memory"):
            budget.take("c", 1)
        budget.give_back("a", 50)
        budget.take("c", 50)

    play(test)
