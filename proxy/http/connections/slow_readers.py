"""Disconnects a client that does not read its answer."""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import termios

from tandem.proxy.http.connections.timer import Timer

log = logging.getLogger(__name__)

_MIN_PROGRESS_BYTES = 16 * 1024
"""Bytes that a client must read from its answer within the time limit while its buffer is full."""


class ReadWatch:
    """Aborts a transport while it is watched and the client reads less than 16 KiB within the time limit.

    The writer must add nothing meanwhile: what the buffers shrink by is what the client has read.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._timer = Timer()

    def start(self, transport: asyncio.Transport) -> None:
        """Does nothing where it is running."""
        if not self._timer.is_running:
            self._timer.start(self._timeout_s, self._check, transport, _num_unread_bytes(transport))

    def cancel(self) -> None:
        self._timer.cancel()

    def _check(self, transport: asyncio.Transport, num_bytes_before: int) -> None:
        if num_bytes_before - _num_unread_bytes(transport) >= _MIN_PROGRESS_BYTES:
            self.start(transport)
            return
        log.warning("disconnected a client that did not read its answer for %g s", self._timeout_s)
        transport.abort()


def _num_unread_bytes(transport: asyncio.Transport) -> int:
    """Returns the bytes in this process and in the kernel that the client's side has not acknowledged."""
    in_kernel = array.array("i", [0])
    fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_kernel)
    return transport.get_write_buffer_size() + in_kernel[0]
