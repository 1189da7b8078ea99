"""The socket that a proxy listens on, and the other proxies' of the same port, which it minds while nobody else does.

The kernel shares connections out evenly over sockets of one port (SO_REUSEPORT), also to those at which nobody accepts.
So on one host the launcher makes a socket for each proxy and keeps them open, and each proxy is handed them all. What
waits at the socket of a proxy that has died, stands still or is starting is not reset: another one takes it soon, or
its successor does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import time
from collections.abc import Awaitable, Callable, Sequence

from tandem.runtime.listen_socket import bind

log = logging.getLogger(__name__)

BACKLOG = 2048
_CHECK_INTERVAL_S = 0.1
_LOG_INTERVAL_S = 10.0
_MAX_TAKEN = 64
"""From one socket at a time, so that the other proxies get their part."""

Take = Callable[[socket.socket], Awaitable[None]]
"""Serves a connection that has been accepted."""


class ListenSockets:
    """own: this proxy's listening socket. others: the other proxies', none where they are on other hosts."""

    def __init__(self, own: socket.socket, others: Sequence[socket.socket] = ()) -> None:
        self.own = own
        self._others = list(others)
        self._taken: set[asyncio.Task[None]] = set()
        self._logged_at = -_LOG_INTERVAL_S

    @classmethod
    def of(cls, fds: Sequence[int], host: str, port: int) -> ListenSockets:
        """fds: inherited, the own first; with none, host and port are bound. Raises ConfigError."""
        if not fds:
            return cls(bind(host, port))
        for fd in fds:
            os.set_inheritable(fd, False)  # or children would keep the port when this process has left it
        own, *others = (socket.socket(fileno=fd) for fd in fds)
        return cls(own, others)

    async def mind_others(self, take: Take) -> None:
        """Until cancelled: take what has waited at another's socket from one look to the next."""
        poll, by_fd = select.poll(), {listener.fileno(): listener for listener in self._others}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        waited: set[int] = set()
        while by_fd:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            waiting = {fd for fd, event in poll.poll(0) if event & select.POLLIN}
            for fd in waiting & waited:
                for connection in self._accept(by_fd[fd]):
                    self._taken.add(task := asyncio.create_task(_serve(connection, take)))
                    task.add_done_callback(self._taken.discard)
            waited = waiting

    def _accept(self, listener: socket.socket) -> list[socket.socket]:
        """What is there, some at least."""
        accepted: list[socket.socket] = []
        while len(accepted) < _MAX_TAKEN:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                break
            except OSError as error:  # the client has left, or there are no descriptors just now
                if time.monotonic() - self._logged_at >= _LOG_INTERVAL_S:
                    self._logged_at = time.monotonic()
                    log.warning("cannot take a connection from another proxy's socket: %s", error)
                break
            connection.setblocking(False)
            accepted.append(connection)
        return accepted

    def close(self) -> None:
        self.own.close()
        self.close_others()

    def close_others(self) -> None:
        for listener in self._others:
            listener.close()


async def _serve(connection: socket.socket, take: Take) -> None:
    try:
        await take(connection)
    except OSError:  # TLS that failed, or a client that has left
        connection.close()
