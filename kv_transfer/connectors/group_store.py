"""The store in which the two ends of a process group meet: a TCPStore for each path, which the decode end serves."""

from __future__ import annotations

from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import Store, TCPStore

from tandem.kv_transfer.connectors.addresses import SocketAddress, read_address
from tandem.protocol.sockets import listen_on_free_port

CONNECT_TIMEOUT_S = 20.0
"""Deadline of a wait in the store, and of a group's first message."""


def serve_store(host: str) -> tuple[Store, bytes]:
    """Returns a store for one path, on a free port of `host` only, and its address."""
    fd, port = listen_on_free_port(host)  # the store closes the descriptor
    store = TCPStore(host, port, None, True, timedelta(seconds=CONNECT_TIMEOUT_S), False, master_listen_fd=fd)
    return store, msgspec.msgpack.encode(SocketAddress(host, port))


def connect_store(address: bytes) -> Store:
    """Connects to the decode end's store. Blocks for up to CONNECT_TIMEOUT_S."""
    server = read_address(address, SocketAddress)
    return TCPStore(server.host, server.port, None, False, timedelta(seconds=CONNECT_TIMEOUT_S), False)
