"""A streamed answer on its way to the client, and what ends with a client that goes away.

In place of Litestar's own stream: a token passes through one generator and one call of `send` here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from litestar import Response
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from tandem.proxy.answers.errors import ClientDisconnected
from tandem.proxy.answers.request_id import HEADER

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
"""Ends the last event of a stream that ended well."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # no proxy in between may hold events back
]


class EventStream(Response[bytes]):
    """Server-sent events: the first, which is there already, and the rest. Both end when the client goes away."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], request_id: str) -> None:
        super().__init__(b"")
        self._stream = _AsgiStream(first, events, request_id)

    def to_asgi_response(self, *arguments: Any, **options: Any) -> ASGIResponse:
        return self._stream


class _AsgiStream(ASGIResponse):
    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], request_id: str) -> None:
        super().__init__()
        self._headers = [*_HEADERS, (HEADER.encode(), request_id.encode("latin-1"))]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnected):
            await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            last = b""
            async for event in events:
                if event.endswith(DONE):
                    last = event  # it goes out with the end of the answer, in one packet
                else:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": last, "more_body": False})


async def first_of(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away first. Raises ClientDisconnected then."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientDisconnected("the client has gone away")
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)
        del worker, watcher  # an error of theirs refers to this frame, and would to itself


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
