"""HTTP connections with bounds on what a client may cost: uvicorn's protocol, which has few of its own.

A request's head is bounded in bytes and in time. A client that does not read costs a bounded buffer and is cut off when
nothing moves for long: where it reads slower than its tokens come, uvicorn stops asking for more at 64 KiB, and what
comes meanwhile is merged into one larger delta. Bodies are bounded in `proxy.request_body`.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import socket
import termios
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from protocol.errors import InvalidRequest, TandemError
from proxy.connections import Connections
from proxy.http_errors import ClientTooSlow, HeadTooLarge, error_body, status_of

log = logging.getLogger(__name__)

KERNEL_BUFFER_BYTES = 256 * 1024
"""What the kernel keeps for a client on top of the 64 KiB; left alone it grows to several MiB for each."""
MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers."""
_LAST_HEAD_S = 0.5
"""For the head of a request to arrive on a connection that was open when the server was told to stop."""
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


def make_protocol(timeout_s: float, connections: Connections) -> type[HttpToolsProtocol]:
    """connections: counted there; what has no place is told so, and closed. timeout_s: for a request's head, from its
    connection or its first byte; and for 16 KiB of an answer to be read.

    The request of a client that is cut off ends as if it had hung up.
    """

    class HttpProtocol(HttpToolsProtocol):
        _buffer_watch: asyncio.TimerHandle | None = None
        _head_watch: asyncio.TimerHandle | None = None
        _num_head_bytes = 0
        _is_counted = False
        _is_last = False
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
            if self._head_watch is not None:  # also where one header never ends, of which the parser tells nothing yet
                self._num_head_bytes += len(data)
            super().data_received(data)
            if self._head_watch is not None and self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse_head(HeadTooLarge(f"The request's head is larger than {MAX_HEAD_BYTES} bytes."))

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
            self._unwatch_head()
            if self.transport.is_closing():
                return
            self.transport.write(_refusal(error))
            self.transport.close()

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

    return HttpProtocol


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
