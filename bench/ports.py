"""Ports of the loopback address that nobody uses."""

from __future__ import annotations

import errno
import random
import socket


def free_port(num_free: int = 2) -> int:
    """The first of `num_free` neighbours that nobody listens on: `tandem up` takes two, the second for its operators.

    Below those that the kernel gives to connections, one of which might take it before it is used.
    """
    while True:
        port = random.randrange(12_000, 32_000 - num_free)
        if all(_is_free(port + each) for each in range(num_free)):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        return True
