"""TCP sockets that are bound by one process and served by another."""

from __future__ import annotations

import socket

from tandem.runtime.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Returns a bound, non-blocking socket with SO_REUSEPORT. It does not listen yet. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener
