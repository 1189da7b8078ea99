"""HTTP connections with bounds on what a client may cost: uvicorn's protocol, which has few of its own.

What is read from a connection at once is bounded, so that many that send large bodies leave time for others between
them. A request's head is bounded in bytes and in time. A client that does not read costs a bounded buffer and is cut
off when nothing moves for long: where it reads slower than its tokens come, uvicorn stops asking for more at 64 KiB,
and what comes meanwhile is merged into one larger delta. Bodies are bounded in `proxy.http.bodies`.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import socket
import termios
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem.proxy.answers.errors import ClientTooSlow, HeadTooLarge, error_body, status_of
from tandem.proxy.http.connections import Connections
from tandem.proxy.http.transport import JoinedHeads
from tandem.runtime.errors import InvalidRequest, TandemError

log = logging.getLogger(__name__)

KERNEL_BUFFER_BYTES = 256 * 1024
"""What the kernel keeps for a client on top of the 64 KiB; left alone it grows to several MiB for each."""
MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers."""
READ_BYTES = 66 * 1024
"""That are read at once, a little more than the body after which uvicorn pauses a connection (64 KiB) until its
application has taken that. uvloop alone reads 256 KiB, again and again: milliseconds when sixty clients send."""
_READ_HEAD_BYTES = 4 * 1024
"""That are read at once while a head is expected, to know how much follows before it is read."""
_LAST_HEAD_S = 0.5
"""For the head of a request to arrive on a connection that was open when the server was told to stop."""
_FAREWELL_S = 1.0
_MAX_UNHEARD_BYTES = 1024 * 1024
"""Of a client whose request has been refused: after so long, or so many bytes, its connection is closed."""
_MIN_PROGRESS_BYTES = 16 * 1024
_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


class _HeadRefusedError(Exception):
    """Ends parsing; the answer has been sent."""


class _BoundedReads(asyncio.BufferedProtocol):
    """Hands the data to a connection's protocol in pieces of READ_BYTES at most, which are not to be kept."""

    _buffer = memoryview(bytearray(READ_BYTES))
    """Of all connections: what is in it is handed on before anything else is read."""
    _head_buffer = _buffer[:_READ_HEAD_BYTES]

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._protocol.connection_made(JoinedHeads(cast(asyncio.Transport, transport), self._protocol.loop))

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._head_buffer if self._protocol.expects_head else self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._protocol.data_received(self._buffer[:nbytes])

    def eof_received(self) -> bool | None:
        self._protocol.eof_received()
        return None

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


def make_protocol(timeout_s: float, connections: Connections) -> Callable[..., asyncio.BaseProtocol]:
    """What makes a connection's protocol, for `uvicorn.Config`.

    connections: counted there; what has no place is told so, and closed. timeout_s: for a request's head, from its
    connection or its first byte; and for 16 KiB of an answer to be read.

    The request of a client that is cut off ends as if it had hung up.
    """

    class HttpProtocol(HttpToolsProtocol):
        _buffer_watch: asyncio.TimerHandle | None = None
        _head_watch: asyncio.TimerHandle | None = None
        _num_head_bytes = 0
        _is_counted = False
        _is_last = False
        _num_unheard_bytes: int | None = None  # since it was refused
        _address = ""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self._socket: Any = transport.get_extra_info("socket")
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BUFFER_BYTES)
            super().connection_made(transport)
            self._address = self.client[0] if self.client is not None else ""
            if (error := connections.add(self._address)) is not None:
                self._refuse_connection(error)
                return
            self._is_counted = True
            self._watch_head()

        def _refuse_connection(self, error: TandemError) -> None:
            self.transport.pause_reading()
            self.transport.write(_refusal(error))
            self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._is_counted:
                self._is_counted = False
                connections.remove(self._address)
            self._unwatch_head()
            self._unwatch_buffer()
            super().connection_lost(exc)

        # ---- a head that is too long, or too long in coming

        def data_received(self, data: bytes) -> None:
            if self._num_unheard_bytes is not None:
                self._num_unheard_bytes += len(data)
                if self._num_unheard_bytes > _MAX_UNHEARD_BYTES:
                    self.transport.close()
                return
            if self._head_watch is not None:  # also where one header never ends, of which the parser tells nothing yet
                self._num_head_bytes += len(data)
            super().data_received(data)
            self._watch_rest_of_body()
            if self._head_watch is not None and self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse_head(HeadTooLarge(f"The request's head is larger than {MAX_HEAD_BYTES} bytes."))

        def _watch_rest_of_body(self) -> None:
            """Of a request that was answered before its body had come: uvicorn waits for that without a limit."""
            has_answered = self.cycle is not None and self.cycle.response_complete and self._head_watch is None
            if has_answered and self.timeout_keep_alive_task is None and not self.transport.is_closing():
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

        @property
        def expects_head(self) -> bool:
            cycle = self.cycle
            return self._head_watch is not None or (
                cycle is not None and cycle.response_complete and not cycle.more_body
            )

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._head_watch is None:  # not the connection's first request
                self._watch_head()
                self._num_head_bytes = 1  # at least

        def on_headers_complete(self) -> None:
            self._unwatch_head()
            if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
                self._refuse_head(HeadTooLarge(f"The request's head is larger than {MAX_HEAD_BYTES} bytes."))
                raise _HeadRefusedError
            super().on_headers_complete()
            if any(name == b"content-length" and len(value) > 4 for name, value in self.headers):
                self.flow.pause_reading()  # until its application asks for the body
            if self._is_last:
                self.cycle.keep_alive = False

        def send_400_response(self, msg: str) -> None:
            self._refuse_head(InvalidRequest(f"{msg} It is not HTTP/1.1."))

        def _watch_head(self) -> None:
            self._num_head_bytes = 0
            self._head_watch = self.loop.call_later(timeout_s, self._on_late_head)

        def _unwatch_head(self) -> None:
            if self._head_watch is not None:
                self._head_watch.cancel()
                self._head_watch = None

        def _on_late_head(self) -> None:
            if self._num_head_bytes:
                self._refuse_head(ClientTooSlow(f"The request's head did not arrive within {timeout_s:g} s."))
            else:
                self.transport.close()  # connected, but never asked

        def _refuse_head(self, error: TandemError) -> None:
            """Tells it, and lets what it still sends come: where that lies unread at the close, a client may lose the
            answer to a reset."""
            self._unwatch_head()
            if self.transport.is_closing() or self._num_unheard_bytes is not None:
                return
            self.transport.write(_refusal(error))
            is_answering = self.cycle is not None and not self.cycle.response_complete
            if is_answering or not self.transport.can_write_eof():  # as with TLS
                self.transport.close()
                return
            self._num_unheard_bytes = 0
            self.transport.write_eof()
            self.loop.call_later(_FAREWELL_S, self.transport.close)

        # ---- a server that stops

        def shutdown(self) -> None:
            """A request that is on its way, of a client that has been accepted, is waited for."""
            if self._head_watch is None:
                super().shutdown()
                return
            self._is_last = True
            self.loop.call_later(_LAST_HEAD_S, self._close_unless_asked)

        def _close_unless_asked(self) -> None:
            if self._head_watch is not None:
                self.transport.close()

        # ---- a client that does not read

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_buffer()

        def resume_writing(self) -> None:
            self._unwatch_buffer()
            super().resume_writing()

        def _watch_buffer(self) -> None:
            # Nothing is added while writing is paused, so what it shrinks by is what the client took.
            self._buffer_watch = self.loop.call_later(timeout_s, self._check_buffer, self._num_bytes_to_take())

        def _num_bytes_to_take(self) -> int:
            return self.transport.get_write_buffer_size() + _num_bytes_in_kernel(self._socket)

        def _unwatch_buffer(self) -> None:
            if self._buffer_watch is not None:
                self._buffer_watch.cancel()
                self._buffer_watch = None

        def _check_buffer(self, num_bytes_before: int) -> None:
            if num_bytes_before - self._num_bytes_to_take() >= _MIN_PROGRESS_BYTES:
                self._watch_buffer()
                return
            log.warning("cut off a client that has not read for %g s", timeout_s)
            self.transport.abort()

    def make(**kwargs: Any) -> _BoundedReads:
        return _BoundedReads(HttpProtocol(**kwargs))

    return make


def _refusal(error: TandemError) -> bytes:
    """A whole answer, after which the connection is closed."""
    status, body = status_of(error), error_body(error)
    retry_after = b"retry-after: 1\r\n" if status in (429, 503) else b""
    head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nconnection: close\r\n%scontent-length: %d\r\n\r\n"
    return head % (status, _REASONS[status], retry_after, len(body)) + body


def _num_bytes_in_kernel(connection: Any) -> int:
    """Sent, but not yet acknowledged by the client's side. The kernel asks for more only when a third of it is free."""
    count = array.array("i", [0])
    fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, count)
    return count[0]
