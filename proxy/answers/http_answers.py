"""Answers as HTTP responses: whole, a stream of events or a file, with the id of their request.

A stream may show the timeline of its request.

Work for a client that disconnects is cancelled.

The id of a request is the client's own from `X-Request-Id`, or a new one. The answer carries the same header. Answers
of the Messages API have it as `request-id` too, where Anthropic's clients look for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import BinaryIO, NoReturn, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from tandem.proxy.admission.budgets import DescriptorBudget
from tandem.proxy.answers.json_parts import Part, pieces
from tandem.proxy.api.schema import REQUEST_ID_PATTERN
from tandem.runtime.errors import InvalidRequest, RequestAborted
from tandem.runtime.tasks import start
from tandem.telemetry.request_log import RequestRecord

ID_HEADER = "x-request-id"
ANTHROPIC_ID_HEADER = "request-id"
_VALID = re.compile(REQUEST_ID_PATTERN)


class ClientDisconnected(RequestAborted):
    """The client has closed its connection before the answer was complete."""


def request_id_of(request: Request) -> str:
    """Returns the same id for every call with this request. An invalid header is ignored."""
    state = request.scope["state"]
    known: str | None = state.get("request_id")
    if known is None:
        given = request.headers.get(ID_HEADER, "")
        known = given if _VALID.fullmatch(given) else secrets.token_hex(12)
        state["request_id"] = known
    return known


def check_request_id(request: Request) -> None:
    """Raises InvalidRequest where the client's header is invalid."""
    given = request.headers.get(ID_HEADER)
    if given is not None and not _VALID.fullmatch(given):
        raise InvalidRequest("X-Request-Id must be 1 to 128 visible ASCII characters without spaces.", ID_HEADER)


def id_header(request: Request) -> dict[str, str]:
    request_id = request_id_of(request)
    return (
        {ID_HEADER: request_id, ANTHROPIC_ID_HEADER: request_id} if is_anthropic(request) else {ID_HEADER: request_id}
    )


def is_anthropic(request: Request) -> bool:
    """Returns whether the request is for Anthropic's Messages API."""
    return str(request.scope.get("path", "")).startswith("/v1/messages")


T = TypeVar("T")
KEEP_ALIVE_S = 15.0
"""Longest silence of a stream. Load balancers close connections that are silent for 30 to 60 s."""
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients of server-sent events skip."""
_END_OF_EVENT = b"\n\n"
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # reverse proxies must not hold events back
}


async def begun(receive: Receive, events: AsyncGenerator[bytes, None], wait_s: float) -> asyncio.Task[bytes]:
    """Returns the first event, which may still be awaited after `wait_s`.

    Raises what the generator raises before that, and ClientDisconnected. An error can then be an HTTP status; a later
    one must be an event.
    """
    first = start(anext(events))
    try:
        await unless_disconnected(receive, asyncio.wait({first}, timeout=wait_s))
        if first.done():
            first.result()
        return first
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        raise


class EventStream(Response):
    """Server-sent events. The generator is closed when the stream ends or the client disconnects.

    Differs from Starlette's StreamingResponse in three ways: the first event was awaited before the status was chosen,
    the last event, which ends with `end`, is sent together with the end of the answer, and something is sent whenever
    the stream would be silent for long.
    """

    def __init__(
        self,
        first: asyncio.Task[bytes],
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        end: bytes,
        error_event: Callable[[Exception], bytes],
        keep_alive: bytes = KEEP_ALIVE,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        """first: as `begun` returns it. end: an empty one matches no event. error_event: encodes an error of `first`.

        keep_alive: sent after `keep_alive_s` of silence.
        """
        self.status_code = 200
        self.background = None
        self.init_headers({**_HEADERS, **headers})
        self._first = first
        self._events = events
        self._end = end
        self._error_event = error_event
        self._keep_alive = keep_alive
        self._keep_alive_s = keep_alive_s
        self._sent_at = 0.0
        self._num_sending = 0
        self._is_between_events = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnected):
                await unless_disconnected(receive, self._send_all(send))
        finally:
            self._first.cancel()  # a client that left before the head was sent has never awaited it
            await asyncio.gather(self._first, return_exceptions=True)
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._sent_at = asyncio.get_running_loop().time()
        keeping_alive = start(self._send_keep_alives(send))
        try:
            last = await self._send_events(send)
        finally:
            keeping_alive.cancel()
            [ended] = await asyncio.gather(keeping_alive, return_exceptions=True)
        if not isinstance(ended, asyncio.CancelledError):
            raise ended
        await self._send(send, last, more_body=False)

    async def _send_events(self, send: Send) -> bytes:
        """Sends all events except the last one, which it returns."""
        last = b""
        try:
            await self._send(send, await self._first)
        except Exception as error:
            return self._error_event(error)
        async for event in self._events:
            if self._end and event.endswith(self._end):
                last = event
            else:
                await self._send(send, event)
        return last

    async def _send(self, send: Send, event: bytes, *, more_body: bool = True) -> None:
        self._num_sending += 1
        self._is_between_events = event.endswith(_END_OF_EVENT)  # large events come in pieces
        await send({"type": "http.response.body", "body": event, "more_body": more_body})
        self._num_sending -= 1
        self._sent_at = asyncio.get_running_loop().time()

    async def _send_keep_alives(self, send: Send) -> NoReturn:
        """Sends `keep_alive` after silence, but not while the client has yet to read what was sent before."""
        now = asyncio.get_running_loop().time
        while True:
            if (silence_s := now() - self._sent_at) < self._keep_alive_s:
                await asyncio.sleep(self._keep_alive_s - silence_s)
            elif self._num_sending or not self._is_between_events:
                await asyncio.sleep(self._keep_alive_s)
            else:
                await self._send(send, self._keep_alive)


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Returns the result of `work`. Cancels it and raises ClientDisconnected when the client disconnects first.

    The work runs in the caller's task, so no result is lost between two tasks if this is cancelled at that moment: what
    it holds would never be released.
    """
    is_over = False

    def on_disconnect(watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled():
            watcher.exception()  # as good as a disconnect
            if not is_over:
                limit.reschedule(0.0)

    try:
        async with asyncio.timeout(None) as limit:
            watcher = start(_disconnect(receive))
            watcher.add_done_callback(on_disconnect)
            try:
                return await work
            finally:
                is_over = True
                watcher.cancel()
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise ClientDisconnected("the client has disconnected") from error


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class WholeAnswer(Response):
    """A body in parts. It is sent in pieces, so that the limits on what a client leaves unread hold for it."""

    def __init__(
        self, parts: Sequence[Part], headers: Mapping[str, str], on_end: Callable[[], None], status: int = 200
    ) -> None:
        """headers: by default the body is JSON. on_end: called when it is sent, or the client has disconnected."""
        self.status_code = status
        self.background = None
        num_bytes = sum(map(len, parts))
        self.init_headers({"content-type": "application/json", **headers, "content-length": str(num_bytes)})
        self._parts = parts
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            last = b""
            for piece in pieces(self._parts):
                if last:
                    await send({"type": "http.response.body", "body": last, "more_body": True})
                last = piece
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._on_end()


TIMELINE_HEADER = "x-tandem-timeline"
TIMELINE_PREFIX = b": tandem-timeline "
MAX_COMMENT_BYTES = 1 << 20
"""Limit for the comments of a stream. Beyond it only the whole timeline at the end follows."""


def wants_timeline(value: str | None) -> bool:
    """value: of the request's header. Raises InvalidRequest unless it is 0, 1 or missing."""
    if value not in (None, "0", "1"):
        raise InvalidRequest(f"X-Tandem-Timeline must be 1 or 0, not {value!r}.", TIMELINE_HEADER)
    return value == "1"


def timeline_comment(record: RequestRecord) -> bytes:
    return TIMELINE_PREFIX + msgspec.json.encode(record.timeline()) + b"\n\n"


async def with_timeline(events: AsyncGenerator[bytes, None], record: RequestRecord) -> AsyncGenerator[bytes, None]:
    """Yields the events, each preceded by the timeline if something has happened since the last one.

    Clients of server-sent events skip it as a comment. The client sees only the timeline of its own request, whichever
    proxy serves it, so no id is looked up.
    """
    num_known = num_bytes = 0
    async with aclosing(events):
        async for event in events:
            has_ended = record.ended_at is not None
            if (num_bytes < MAX_COMMENT_BYTES or has_ended) and (num_events := record.num_events()) != num_known:
                comment = timeline_comment(record)
                event = comment + event
                num_known, num_bytes = num_events, num_bytes + len(comment)
            yield event


_NUM_DESCRIPTORS = 2
"""The one by which the file is found, and the one that Starlette reads."""


class Download(FileResponse):
    """A file, which is open while the client reads it: its descriptors count until then.

    It may be deleted at any moment. So it is opened before anything is sent, and found by its descriptor from then on.
    """

    def __init__(
        self,
        open_file: Callable[[], Awaitable[BinaryIO]],
        descriptors: DescriptorBudget,
        client: str,
        headers: dict[str, str],
        media_type: str = "application/octet-stream",
    ) -> None:
        """open_file: may raise the error that tells the client why there is no such file."""
        super().__init__("", headers=headers, media_type=media_type)
        self._open = open_file
        self._descriptors = descriptors
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ClientShareExceeded, Overloaded and as `open_file` does before anything is sent."""
        with self._descriptors.hold(self._client, _NUM_DESCRIPTORS), await self._open() as file:
            self.path = f"/proc/self/fd/{file.fileno()}"
            await super().__call__(scope, receive, send)
