"""Accepts connections, and with TLS shakes hands within a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from tandem.proxy.http.connections.client_connection import ClientConnection
from tandem.proxy.http.connections.connection_limits import ConnectionLimits
from tandem.proxy.http.connections.request_framing import FramedHttpProtocol
from tandem.runtime.tasks import start_job

HANDSHAKE_S = 5.0
"""Time for a whole TLS handshake, which takes two round trips."""
_TLS_SHUTDOWN_S = 2.0
"""How long a closing connection waits for the client's end of TLS."""


def connection_factory(
    limits: ConnectionLimits, timeout_s: float, tls: ssl.SSLContext | None
) -> Callable[..., asyncio.Protocol]:
    """Returns what makes a connection's protocol, for `uvicorn.Config(http=...)`."""

    def make(**arguments: Any) -> asyncio.Protocol:
        connection = ClientConnection(partial(FramedHttpProtocol, **arguments), limits, timeout_s)
        return TlsAccept(connection, tls) if tls is not None else connection

    return make


class TlsAccept(asyncio.Protocol):
    """Accepts a connection without reading from it, counts it, and hands its socket over to a TLS transport.

    An asyncio server that speaks TLS itself reports a connection only after its handshake. `loop.start_tls` cannot be
    used on a connection just accepted: uvloop may have read from it before.
    """

    def __init__(self, connection: ClientConnection, context: ssl.SSLContext) -> None:
        self._connection = connection
        self._context = context

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        if self._connection.admit(transport) is None:
            try:
                duplicate = transport.get_extra_info("socket").dup()
            except OSError:  # no descriptor is left
                self._connection.connection_lost(None)
            else:
                on_failure = partial(self._connection.connection_lost, None)
                start_job(self._shake_hands(duplicate), "a TLS handshake", on_failure)
        transport.abort()  # closes its own descriptor; the connection lives on where it was duplicated

    async def _shake_hands(self, duplicate: socket.socket) -> None:
        with contextlib.suppress(OSError):  # also ssl.SSLError: the client speaks no TLS, or too slowly
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._connection,
                duplicate,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=_TLS_SHUTDOWN_S,
            )
        if not self._connection.is_open:  # the handshake failed, or the client left during it
            self._connection.connection_lost(None)
