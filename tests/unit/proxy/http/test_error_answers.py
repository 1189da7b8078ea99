"""Errors are answered on the event loop: many at once start no threads."""

from __future__ import annotations

import threading

from starlette.requests import Request
from starlette.responses import Response

from tandem.proxy.admission.answer_budget import AnswerBudget
from tandem.proxy.http.starlette_app import ApiRoute, starlette_app
from tandem.runtime.errors import InvalidRequest
from tests.support.http_listener import LAST_GET, play, served


def test_errors_start_no_threads() -> None:
    async def refuse(request: Request) -> Response:
        raise InvalidRequest("no")

    async def fail(request: Request) -> Response:
        raise RuntimeError("a mistake")

    app = starlette_app([ApiRoute("GET", "/refused", refuse), ApiRoute("GET", "/failed", fail)], None, AnswerBudget())

    async def test() -> None:
        async with served(app) as server:
            before = set(threading.enumerate())
            for path, status in (("/refused", b"400"), ("/failed", b"500"), ("/nothing", b"404")):
                answer = await server.exchange(LAST_GET.replace(b"/ ", path.encode() + b" ", 1))
                assert answer.startswith(b"HTTP/1.1 " + status)
            assert set(threading.enumerate()) == before

    play(test)
