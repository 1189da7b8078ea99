"""Answers of errors: on the event loop, since many at once start no threads, and whether a retry is of use."""

from __future__ import annotations

import threading

from starlette.requests import Request
from starlette.responses import Response

from tandem.proxy.admission.budgets import AnswerBudget
from tandem.proxy.cluster.router import NeverInTime, SLOUnreachable
from tandem.proxy.http.starlette_app import ApiRoute, starlette_app
from tandem.runtime.errors import InvalidRequest
from tests.support.http_listener import LAST_GET, on_uvloop, served


@on_uvloop
async def test_errors_start_no_threads() -> None:
    async def refuse(request: Request) -> Response:
        raise InvalidRequest("no")

    async def fail(request: Request) -> Response:
        raise RuntimeError("a mistake")

    app = starlette_app([ApiRoute("GET", "/refused", refuse), ApiRoute("GET", "/failed", fail)], None, AnswerBudget())
    async with served(app) as server:
        before = set(threading.enumerate())
        for path, status in (("/refused", b"400"), ("/failed", b"500"), ("/nothing", b"404")):
            answer = await server.exchange(LAST_GET.replace(b"/ ", path.encode() + b" ", 1))
            assert answer.startswith(b"HTTP/1.1 " + status)
        assert set(threading.enumerate()) == before


@on_uvloop
async def test_a_refusal_that_would_come_again_asks_for_no_retry() -> None:
    async def late(request: Request) -> Response:
        raise SLOUnreachable(3.0, 1.0, 0.5).within(2.0, 0.0)

    async def never(request: Request) -> Response:
        raise NeverInTime(3.0, 1.0)

    app = starlette_app([ApiRoute("GET", "/late", late), ApiRoute("GET", "/never", never)], None, AnswerBudget())
    async with served(app) as server:
        answer = await server.exchange(LAST_GET.replace(b"/ ", b"/late ", 1))
        assert b" 503 " in answer and b"retry-after: 2" in answer and b"x-should-retry" not in answer
        answer = await server.exchange(LAST_GET.replace(b"/ ", b"/never ", 1))
        assert b" 503 " in answer and b"retry-after" not in answer and b"x-should-retry: false" in answer
