"""Streamed answers, and work that is cancelled when its client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.proxy.answers.errors import ClientDisconnected
from tandem.runtime.tasks import start

T = TypeVar("T")
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # reverse proxies must not hold events back
}


class EventStream(Response):
    """Server-sent events. The generator is closed when the stream ends or the client disconnects.

    Differs from Starlette's StreamingResponse in two ways: `first` has been made before the status was chosen, and the
    last event, which ends with `end`, is sent together with the end of the answer. An empty `end` matches none.
    """

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], headers: Mapping[str, str], end: bytes
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**_HEADERS, **headers})
        self._first = first
        self._events = events
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnected):
            await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            last = b""
            async for event in events:
                if self._end and event.endswith(self._end):
                    last = event
                else:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": last, "more_body": False})


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Returns the result of `work`. Cancels it and raises ClientDisconnected when the client disconnects first."""
    worker = start(work)
    watcher = start(_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientDisconnected("the client has disconnected")
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
