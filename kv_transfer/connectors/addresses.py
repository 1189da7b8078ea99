"""Addresses of data paths: what a receiver tells its sender in the handshake, encoded by msgpack."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tandem.runtime.errors import KVTransferFailed

A = TypeVar("A")

CONNECT_TIMEOUT_S = 20.0
"""Deadline of a sender that connects to its receiver, and of the first message of a process group."""


class SocketAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a receiver listens."""

    host: str
    port: int


def read_address(address: bytes, kind: type[A]) -> A:
    """Decodes an address of the peer. Raises KVTransferFailed."""
    try:
        return msgspec.msgpack.decode(address, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise KVTransferFailed(f"the peer's address cannot be read: {error}") from error
