"""Actions that a worker's schedulers ask of its shell."""

from __future__ import annotations

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
    src_block_ids: list[int]
    dst_block_ids: list[int]


class Receive(msgspec.Struct, frozen=True):
    """Receive announced blocks through the pair's connector. `on_received` must follow exactly once.

    checksums: expected checksums of the blocks, or empty. If they differ, `on_corrupt` follows instead.
    """

    pair_id: str
    transfer_id: str
    block_ids: list[int]
    checksums: list[int] = []


class StoreBlocks(msgspec.Struct, frozen=True):
    """Copy blocks to a tier below the pool (`kv_transfer.tiers`). `on_stored` must follow exactly once.

    hashes: of the blocks, in the same order.
    """

    tier: str
    block_ids: list[int]
    hashes: list[bytes]


class LoadBlocks(msgspec.Struct, frozen=True):
    """Copy blocks from a tier into the pool, in order, until one is missing. `on_loaded` must follow exactly once."""

    tier: str
    load_id: int
    block_ids: list[int]
    hashes: list[bytes]


class FindBlocks(msgspec.Struct, frozen=True):
    """Ask a tier how many of these blocks it holds before the first that it lacks. `on_found` must follow once."""

    tier: str
    load_id: int
    hashes: list[bytes]


Action = SendToProxy | SendToPeer | Ship | Receive | StoreBlocks | LoadBlocks | FindBlocks
