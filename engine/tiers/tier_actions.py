"""Actions that the tiers below the KV pool ask of the worker's shell."""

from __future__ import annotations

import msgspec


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


TierAction = StoreBlocks | LoadBlocks | FindBlocks
