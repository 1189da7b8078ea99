"""uvicorn's server with the sockets of `proxy.http.listening`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from tandem.proxy.http.listening import ListenSockets


class HttpServer(uvicorn.Server):
    """`serve` runs until `should_exit` is set, and what is under way has ended or its grace is over.

    Without uvicorn's signal handling, which would end the process by the signal itself and not with exit code 0.
    """

    def __init__(self, config: uvicorn.Config, doors: ListenSockets) -> None:
        super().__init__(config)
        self._doors = doors
        self._minding: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([self._doors.own])
        self._minding = asyncio.create_task(self._doors.mind_others(self._take))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._minding is not None:
            self._minding.cancel()
        self._doors.close_others()
        await super().shutdown([self._doors.own])

    async def _take(self, connection: socket.socket) -> None:
        def make() -> asyncio.Protocol:
            protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return protocol

        await asyncio.get_running_loop().connect_accepted_socket(make, connection, ssl=self.config.ssl)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
