"""Finds the peer among those that connect to a path's port, which anyone who reaches the host can do.

All connections perform their TLS handshake and greeting beside each other, on the calling thread. One that is refused,
that takes too long, or that is the oldest of too many is closed at once. So strangers cost a limited number of
descriptors, and the peer does not wait for them.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tandem.runtime.errors import KVTransferFailed, first_line

GREETING_TIMEOUT_S = 2.0
"""Deadline of a new connection's TLS handshake and greeting."""
MAX_GREETINGS = 16
"""Connections whose greeting is incomplete. For another one the oldest is closed: a peer that is there needs two round
trips, while strangers that say nothing would keep the places for their whole deadline."""


@dataclass(frozen=True)
class _Arrival:
    """A connection whose greeting is incomplete. steps: yields the events to wait for, and ends with the greeting."""

    steps: Iterator[int]
    deadline: float


def accept_peer(
    listener: socket.socket, greeting: bytes, context: ssl.SSLContext | None, timeout_s: float
) -> socket.socket:
    """Returns the connection that begins with `greeting`, non-blocking. The caller closes it, and the listener.

    Shutting the listener down on another thread ends the wait. Raises OSError then, and KVTransferFailed if no peer
    comes in time, with the last stranger's fault.
    """
    with _Arrivals(listener, greeting, context) as arrivals:
        deadline = time.monotonic() + timeout_s
        while (peer := arrivals.wait(deadline)) is None:
            if time.monotonic() >= deadline:
                raise KVTransferFailed(f"the peer did not connect in {timeout_s:g} s: {arrivals.refused}")
        return peer


class _Arrivals:
    """The connections of one listener until the peer is found. refused: why the last one was closed."""

    def __init__(self, listener: socket.socket, greeting: bytes, context: ssl.SSLContext | None) -> None:
        self.refused = "nothing connected"
        self._listener = listener
        self._greeting = greeting
        self._context = context
        self._by_connection: dict[socket.socket, _Arrival] = {}  # oldest first
        self._selector = selectors.PollSelector()  # needs no descriptor of its own

    def __enter__(self) -> _Arrivals:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in list(self._by_connection):
            self._close(connection, self.refused)
        self._selector.close()

    def wait(self, deadline: float) -> socket.socket | None:
        """Waits for the next event, or until `deadline`. Returns the peer's connection if its greeting is complete."""
        deadlines = [deadline, *(arrival.deadline for arrival in self._by_connection.values())]
        ready = {key.fileobj for key, _ in self._selector.select(max(0.0, min(deadlines) - time.monotonic()))}
        for connection in [each for each in self._by_connection if each in ready]:
            if self._advance(connection):
                return self._take(connection)
        for connection, arrival in list(self._by_connection.items()):
            if time.monotonic() >= arrival.deadline:
                self._close(connection, f"a connection said too little in {GREETING_TIMEOUT_S:g} s")
        if self._listener in ready:  # last, so that a complete greeting is read before its connection is the oldest
            self._accept()
        return None

    def _accept(self) -> None:
        try:
            plain, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has left already
            return
        if len(self._by_connection) >= MAX_GREETINGS:
            self._close(next(iter(self._by_connection)), "too many connections at once")
        try:
            plain.setblocking(False)
            connection = plain
            if self._context is not None:
                connection = self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        except OSError as error:  # it has left already
            plain.close()
            self.refused = first_line(error)
            return
        arrival = _Arrival(_greet(connection, self._greeting), time.monotonic() + GREETING_TIMEOUT_S)
        self._by_connection[connection] = arrival
        self._selector.register(connection, selectors.EVENT_READ)

    def _advance(self, connection: socket.socket) -> bool:
        """Goes on with a greeting. Returns whether it is complete."""
        try:
            events = next(self._by_connection[connection].steps, None)
        except (OSError, KVTransferFailed) as error:
            self._close(connection, first_line(error))
            return False
        if events is None:
            return True
        self._selector.modify(connection, events)
        return False

    def _take(self, connection: socket.socket) -> socket.socket:
        self._selector.unregister(connection)
        del self._by_connection[connection]
        return connection

    def _close(self, connection: socket.socket, reason: str) -> None:
        self.refused = reason
        self._take(connection).close()


def _greet(stranger: socket.socket, greeting: bytes) -> Iterator[int]:
    """Performs the TLS handshake, if the connection has one, and reads the greeting. Yields the events to wait for.

    Raises OSError, and KVTransferFailed at the first byte that differs.
    """
    if isinstance(stranger, ssl.SSLSocket):
        while True:
            try:
                stranger.do_handshake()
                break
            except ssl.SSLWantReadError:
                yield selectors.EVENT_READ
            except ssl.SSLWantWriteError:
                yield selectors.EVENT_WRITE
    received = b""
    while received != greeting:
        try:
            data = stranger.recv(len(greeting) - len(received))
        except (BlockingIOError, ssl.SSLWantReadError):
            yield selectors.EVENT_READ
            continue
        except ssl.SSLWantWriteError:
            yield selectors.EVENT_WRITE
            continue
        received += data
        if not data or not greeting.startswith(received):
            raise KVTransferFailed("a connection was not of this path")
