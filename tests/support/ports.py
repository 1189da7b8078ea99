"""Finds unused ports on the loopback address."""

from __future__ import annotations

import errno
import secrets
import socket


def free_port(num_free: int = 2) -> int:
    """Returns the first of `num_free` consecutive unused ports; `tandem up` uses the second for its admin address.

    Chooses from below the kernel's ephemeral range, so that no outgoing connection takes the port meanwhile, and not by
    the shared generator: processes that have the same seed would choose the same port.
    """
    while True:
        port = 12_000 + secrets.randbelow(20_000 - num_free)
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
