"""What the schedulers of both roles ask of the worker's shell to hand sequences over. Pure."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tandem.protocol.messages.dispatch import ToProxy
from tandem.protocol.messages.transfer import CloseTransfer, FinishTransfer, KVRefused, KVReserved, ReserveKV


class SendToProxy(msgspec.Struct, frozen=True):
    proxy_id: str
    message: ToProxy


class SendToPeer(msgspec.Struct, frozen=True):
    """Sends over the pair's control connection, in order."""

    pair_id: str
    message: ReserveKV | FinishTransfer | CloseTransfer | KVReserved | KVRefused


class Ship(msgspec.Struct, frozen=True):
    """Move blocks through the pair's connector and announce them. `on_shipped` must follow exactly once."""

    pair_id: str
    transfer_id: str
    first_block: int
    """Number of the first block among those of its group."""
    src_block_ids: list[int]
    dst_block_ids: list[int]
    group: int = 0


class Receive(msgspec.Struct, frozen=True):
    """Receive announced blocks through the pair's connector. `on_received` must follow exactly once.

    checksums: expected checksums of the blocks, or empty. If they differ, `on_corrupt` follows instead.
    """

    pair_id: str
    transfer_id: str
    block_ids: list[int]
    checksums: list[int] = []


HandoverAction = SendToProxy | SendToPeer | Ship | Receive

A = TypeVar("A")
"""Actions that an engine needs besides."""
Actions = list[A | HandoverAction]
