"""HTTP connections whose client does not read: they cost a bounded buffer, and are cut when nothing moves for long.

Where a client reads slower than its tokens come, uvicorn stops asking for more at 64 KiB, and what comes meanwhile is
merged into one larger delta. This adds the end of it: `HttpProtocol` is uvicorn's, with a bound on the kernel's buffer
and a watch on a full one.
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

log = logging.getLogger(__name__)

KERNEL_BUFFER_BYTES = 256 * 1024
"""What the kernel keeps for a client on top of the 64 KiB; left alone it grows to several MiB for each."""
_MIN_PROGRESS_BYTES = 16 * 1024


def make_protocol(timeout_s: float) -> type[HttpToolsProtocol]:
    """uvicorn's HTTP protocol; a client that takes less than 16 KiB in `timeout_s` seconds of a full buffer is cut off.

    Its request then ends as if it had hung up.
    """

    class HttpProtocol(HttpToolsProtocol):
        _watch: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self._socket: Any = transport.get_extra_info("socket")
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BUFFER_BYTES)
            super().connection_made(transport)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_buffer()

        def resume_writing(self) -> None:
            self._unwatch()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)

        def _watch_buffer(self) -> None:
            # Nothing is added while writing is paused, so what it shrinks by is what the client took.
            self._watch = self.loop.call_later(timeout_s, self._check, self._num_bytes_to_take())

        def _num_bytes_to_take(self) -> int:
            return self.transport.get_write_buffer_size() + _num_bytes_in_kernel(self._socket)

        def _unwatch(self) -> None:
            if self._watch is not None:
                self._watch.cancel()
                self._watch = None

        def _check(self, num_bytes_before: int) -> None:
            if num_bytes_before - self._num_bytes_to_take() >= _MIN_PROGRESS_BYTES:
                self._watch_buffer()
                return
            log.warning("cut off a client that has not read for %.0f s", timeout_s)
            self.transport.abort()

    return HttpProtocol


def _num_bytes_in_kernel(connection: Any) -> int:
    """Sent, but not yet acknowledged by the client's side. The kernel asks for more only when a third of it is free."""
    count = array.array("i", [0])
    fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, count)
    return count[0]
