"""Addresses of data paths: what a receiver tells its sender in the handshake, encoded by msgpack."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tandem.runtime.errors import KVTransferFailed

A = TypeVar("A")


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
