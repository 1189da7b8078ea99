"""HTTP connections with limits on what one client may cost, around uvicorn's protocol.

uvicorn parses requests and runs the application. This module adds what uvicorn has no options for:

- the number of connections, in all and from one address (503 and 429);
- the size of a request's head (431) and the time it may take to arrive (408);
- a client that does not read its answer is disconnected;
- a request that is answered before its body has arrived: the answer says `Connection: close`, and what the client still
  sends is discarded for a limited time;
- a graceful stop that waits for a request whose head is still arriving.

`ClientConnection` stands between asyncio's transport and uvicorn's protocol and uses the public interface of both.
`track_requests`, an ASGI middleware, reports to it when a request begins and when its answer is complete.
The size and pace of bodies are limited in `proxy.http.bodies`.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import socket
import termios
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem.proxy.answers.errors import (
    ClientTooSlow,
    HeadTooLarge,
    TooManyConnections,
    TooManyFromClient,
    error_body,
    status_of,
)
from tandem.runtime.errors import InvalidRequest, TandemError
from tandem.runtime.file_limits import take_all_descriptors

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers of one request."""
KERNEL_BUFFER_BYTES = 256 * 1024
"""Kernel send buffer per connection. Without a limit it grows to several MiB for a client that does not read."""
_MIN_PROGRESS_BYTES = 16 * 1024
"""Bytes that a client must read from its answer within the time limit while its buffer is full."""
_LAST_HEAD_S = 0.5
"""How long a server that stops waits for the head of a request on a connection that it has accepted."""
_LINGER_S = 2.0
"""How long a connection stays open for the rest of a request that has been answered. What arrives is discarded. Closing
at once would reset the connection, and the client could lose the answer."""
_OTHER_FDS = 512
"""Descriptors reserved for workers, readers, large bodies and files."""
_LOG_INTERVAL_S = 10.0


class ConnectionLimits:
    """Counts the open connections of one server, in all and by client address.

    on_refused: called for each refused connection. `is_stopping` makes every answer the last one of its connection.
    """

    def __init__(
        self,
        max_total: int,
        max_per_client: int,
        on_refused: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_total = max_total
        self._max_per_client = max_per_client
        self._on_refused = on_refused
        self._clock = clock
        self._by_client: Counter[str] = Counter()
        self._logged_at: float | None = None
        self.num_open = 0
        self.is_stopping = False

    def add(self, client: str) -> TooManyConnections | None:
        """Count a connection until `remove`. Returns an error, and counts nothing, where a limit is reached."""
        if self.num_open >= self._max_total:
            return self._refuse(TooManyConnections(f"This proxy has {self.num_open} connections, which is its limit."))
        if (num_own := self._by_client[client]) >= self._max_per_client:
            message = f"Your address has {num_own} connections to this proxy, which is the limit; reuse them."
            return self._refuse(TooManyFromClient(message))
        self._by_client[client] += 1
        self.num_open += 1
        return None

    def remove(self, client: str) -> None:
        self.num_open -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]

    def _refuse(self, error: TooManyConnections) -> TooManyConnections:
        self._on_refused()
        now = self._clock()
        if self._logged_at is None or now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            log.warning("refused a connection: %s", error.message)
        return error


def affordable_connections(wanted: int) -> int:
    """Returns the number of connections that the process's descriptor limit allows, at most `wanted`."""
    limit = take_all_descriptors()
    affordable = max(limit // 2, limit - _OTHER_FDS)
    if affordable < wanted:
        log.warning("at most %d connections: this process may open %d descriptors (ulimit -n)", affordable, limit)
    return min(wanted, affordable)


class ClientConnection(asyncio.Protocol, asyncio.Transport):
    """One client's connection: applies the limits and passes everything else on to uvicorn's protocol.

    It is a protocol to asyncio's transport, and the transport of uvicorn's protocol.

    A connection is in one of these states:
    - it waits for a head: `_awaits_head`, with a timer from the first byte (from the start for its first request);
    - a request is in flight: from `on_request` to `on_answer_complete`;
    - it is closing: nothing more is written to the client or passed on to uvicorn. What the client still sends is
      discarded for a short time, so that it can read its answer.
    """

    def __init__(self, http: asyncio.Protocol, limits: ConnectionLimits, timeout_s: float) -> None:
        """http: uvicorn's protocol. timeout_s: for a head to arrive, and for 16 KiB of an answer to be read."""
        super().__init__()
        self._http = http
        self._limits = limits
        self._timeout_s = timeout_s
        self._transport: asyncio.Transport
        self._client: str | None = None  # its address, while the connection is counted
        self._awaits_head = True
        self._num_head_bytes = 0
        self._head_end = b""  # the last bytes of a head that is not complete
        self._head_timer = _Timer()
        self._is_parsing = False
        self._in_flight = False
        self._body_complete = True
        self._error: TandemError | None = None  # to send after the answer that is in flight
        self._is_closing = False
        self._close_timer = _Timer()
        self._write_timer = _Timer()

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BUFFER_BYTES)
        peer = transport.get_extra_info("peername")
        address = peer[0] if isinstance(peer, tuple) else ""
        if (error := self._limits.add(address)) is not None:
            self._is_closing = True
            transport.pause_reading()
            transport.write(_refusal(error))
            transport.close()
            return
        self._client = address
        self._http.connection_made(self)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        if self._is_closing or self._error is not None:
            return  # discarded
        if self._awaits_head and not self._check_head(data):
            return
        _current.set(self)
        self._is_parsing = True
        self._http.data_received(data)
        self._is_parsing = False

    def eof_received(self) -> bool | None:
        if not self._is_closing:
            self._http.eof_received()
        return None  # the transport closes

    def pause_writing(self) -> None:
        if self._client is not None:
            self._http.pause_writing()
        if not self._write_timer.is_running:
            self._watch_writes()

    def resume_writing(self) -> None:
        if self._client is not None:
            self._http.resume_writing()
        if not self._is_closing:
            self._write_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._head_timer.cancel()
        self._close_timer.cancel()
        self._write_timer.cancel()
        if self._client is not None:
            self._limits.remove(self._client)
            self._client = None
            self._http.connection_lost(exc)

    # ---- the head of a request

    def _check_head(self, data: bytes) -> bool:
        """Returns False, and refuses the request, where its head is too large."""
        if not self._head_timer.is_running and not self._in_flight:
            self._start_head_timer()
        if not self._num_head_bytes:
            data = data.lstrip(b"\r\n")  # empty lines before a request are allowed, and no part of it
        last = self._head_end + data
        end = last.find(b"\r\n\r\n")
        self._num_head_bytes += len(data) if end < 0 else end + 4 - len(self._head_end)
        self._head_end = last[-3:]
        self._awaits_head = end < 0
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(f"The request's head is larger than {MAX_HEAD_BYTES} bytes."))
            return False
        return True

    def _start_head_timer(self) -> None:
        self._head_timer.start(self._timeout_s, self._on_late_head)

    def _on_late_head(self) -> None:
        if self._num_head_bytes:
            self._refuse(ClientTooSlow(f"The request's head did not arrive within {self._timeout_s:g} s."))
        else:
            self._close_now()  # the client connected and sent nothing

    def _refuse(self, error: TandemError) -> None:
        """Answer with an error and close; an answer that is in flight is completed before."""
        if self._is_closing or self._error is not None:
            return
        if self._in_flight:
            self._error = error
            return
        self._transport.write(_refusal(error))
        self._linger()

    # ---- the application's side, by way of `track_requests`

    def on_request(self, has_body: bool) -> None:
        """The application begins with a request: its head has arrived."""
        self._head_timer.cancel()
        self._awaits_head = False
        self._in_flight = True
        self._body_complete = False
        if not has_body:
            self.on_body_complete()

    def on_body_complete(self) -> None:
        """The application has the whole body of its request: what follows is the head of the next one."""
        if self._body_complete:
            return
        self._body_complete = True
        self._awaits_head = True
        self._num_head_bytes = 0
        self._head_end = b""

    @property
    def is_last_answer(self) -> bool:
        """True where the answer that begins now must say `Connection: close`."""
        return not self._body_complete or self._limits.is_stopping

    def on_answer_complete(self) -> None:
        self._in_flight = False
        if self._is_closing:
            return
        if self._error is not None:
            error, self._error = self._error, None
            self._refuse(error)
        elif self._num_head_bytes:
            self._start_head_timer()

    # ---- uvicorn's side: the methods of a transport that it calls

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_parsing:  # uvicorn writes to its transport while it parses only to refuse what it cannot parse
            self._refuse(InvalidRequest("The request is not valid HTTP/1.1."))
        elif not self._is_closing:
            self._transport.write(data)

    def close(self) -> None:
        """Close as soon as it loses nothing."""
        if self._is_closing or self._is_parsing:
            return
        if not self._body_complete or self._error is not None:
            self._linger()
        elif self._limits.is_stopping and self._head_timer.is_running:
            self._close_timer.start(_LAST_HEAD_S, self._close_unless_asked)
        else:
            self._close_now()

    def _close_unless_asked(self) -> None:
        if self._head_timer.is_running:
            self._close_now()

    def _linger(self) -> None:
        """End the answer, then discard what the client still sends until it closes or a limit is reached."""
        self._is_closing = True
        self._head_timer.cancel()
        if self._transport.can_write_eof():  # not with TLS
            self._transport.write_eof()
        self._transport.resume_reading()
        self._close_timer.start(_LINGER_S, self._close_now)

    def _close_now(self) -> None:
        self._is_closing = True
        self._head_timer.cancel()
        self._close_timer.cancel()
        self._transport.close()
        if not self._write_timer.is_running and self._transport.get_write_buffer_size():
            self._watch_writes()

    # ---- a client that does not read

    def _watch_writes(self) -> None:
        # uvicorn adds nothing while writing is paused, so what the buffers shrink by is what the client has read.
        self._write_timer.start(self._timeout_s, self._check_writes, self._num_unread_bytes())

    def _check_writes(self, num_bytes_before: int) -> None:
        if num_bytes_before - self._num_unread_bytes() >= _MIN_PROGRESS_BYTES:
            self._watch_writes()
            return
        log.warning("disconnected a client that did not read its answer for %g s", self._timeout_s)
        self._transport.abort()

    def _num_unread_bytes(self) -> int:
        """Returns the bytes in this process and in the kernel that the client's side has not acknowledged."""
        in_kernel = array.array("i", [0])
        fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_kernel)
        return self._transport.get_write_buffer_size() + in_kernel[0]


class _Timer:
    """Calls back once after a delay, unless it is cancelled or started again before."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self, delay_s: float, callback: Callable[..., None], *arguments: Any) -> None:
        self.cancel()
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._fire, callback, arguments)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self, callback: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._handle = None
        callback(*arguments)


_current: ContextVar[ClientConnection] = ContextVar("client connection")
"""The connection whose data uvicorn parses. The task that uvicorn starts for a request inherits it."""


def connection_factory(limits: ConnectionLimits, timeout_s: float) -> Callable[..., asyncio.Protocol]:
    """Returns what makes a connection's protocol, for `uvicorn.Config(http=...)`."""

    def make(**arguments: Any) -> ClientConnection:
        return ClientConnection(HttpToolsProtocol(**arguments), limits, timeout_s)

    return make


def track_requests(app: ASGIApp) -> ASGIApp:
    """ASGI middleware that reports each request to its connection and closes connections after their last answer."""

    async def tracked(scope: Scope, receive: Receive, send: Send) -> None:
        connection = _current.get()
        names = {name for name, value in scope["headers"] if value != b"0"}
        connection.on_request(has_body=b"content-length" in names or b"transfer-encoding" in names)

        async def receive_body() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                connection.on_body_complete()
            return message

        async def send_answer(message: Message) -> None:
            if message["type"] == "http.response.start" and connection.is_last_answer:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                connection.on_answer_complete()

        await app(scope, receive_body, send_answer)

    return tracked


def _refusal(error: TandemError) -> bytes:
    """Returns a whole answer, after which the connection is closed."""
    status, body = status_of(error), error_body(error)
    retry_after = b"retry-after: 1\r\n" if status in (429, 503) else b""
    head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nconnection: close\r\n%scontent-length: %d\r\n\r\n"
    return head % (status, HTTPStatus(status).phrase.encode(), retry_after, len(body)) + body
