"""Blocks in a Mooncake store: their keys, their records, and what the library's error codes mean.

This module runs in the process of `mooncake_process`, because Mooncake's calls are not safe in a worker's process.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from tandem.kv_transfer.tiers.block_record import FORMAT_VERSION, HEADER_BYTES, BlockFormat, BlockHeader
from tandem.kv_transfer.tiers.tier import TierFailed

Loaded = Literal["loaded", "missing", "corrupt"]
"""Outcome of a load. Corrupt blocks have been removed."""


class StoreFull(TierFailed):
    """The store has no room for another block. It evicts by itself, so a later block may fit."""


class StoreLost(TierFailed):
    """The master, or a process that gives the store memory, does not answer as it should."""


class Code(IntEnum):
    """Error codes of Mooncake that this module distinguishes or names (`ErrorCode` in its `types.h`)."""

    NO_AVAILABLE_HANDLE = -200
    INVALID_PARAMS = -600
    REPLICA_IS_NOT_READY = -703
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    LEASE_EXPIRED = -707
    TRANSFER_FAIL = -800
    RPC_FAIL = -900
    RPC_TIMEOUT = -901


_KNOWN_CODES = frozenset(Code)
_MISSING = (Code.OBJECT_NOT_FOUND, Code.REPLICA_IS_NOT_READY, Code.LEASE_EXPIRED)
"""Nobody has stored the key, is still storing it, or the store evicted it during the read."""


class DistributedStore(Protocol):
    """The used methods of `mooncake.store.MooncakeDistributedStore`. Negative results are errors, see `Code`."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...
    def put_from(self, key: str, buffer_ptr: int, size: int) -> int: ...
    def get_into(self, key: str, buffer_ptr: int, size: int) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def remove(self, key: str, force: bool) -> int: ...
    def remove_by_regex(self, regex_pattern: str, force: bool) -> int: ...


class MooncakeBlocks:
    """One rank's blocks in a store that is set up. A value is a block record, see `block_record`. Its key is
    tandem/vVERSION/IDENTITY/HASH: the record's format version, and the rest in hex.

    staging: uint8 [record_bytes]. Mooncake reads records from it and writes them to it without another copy.
    Methods raise StoreFull or StoreLost.
    """

    def __init__(self, store: DistributedStore, block_format: BlockFormat, staging: npt.NDArray[np.uint8]) -> None:
        self._store = store
        self._format = block_format
        self._staging = staging
        self._header, self._block = staging[:HEADER_BYTES].data, staging[HEADER_BYTES:].data
        self._address = staging.ctypes.data
        self._prefix = f"tandem/v{FORMAT_VERSION}/{block_format.identity.hex()}/"
        _check(store.register_buffer(self._address, staging.nbytes), "register memory")

    def find(self, hashes: Sequence[bytes]) -> list[bool]:
        """Returns for each block whether the store holds it. Mooncake keeps such blocks for some seconds at least."""
        found = self._store.batch_is_exist([self._key(each) for each in hashes])
        for code in found:
            _check(code, "look for blocks")
        return [code == 1 for code in found]

    def put(self, block_hash: bytes) -> None:
        """Stores the block whose bytes are in the staging memory, unless it is there."""
        self._header[:] = self._format.make_header(block_hash, self._block)
        code = self._store.put_from(self._key(block_hash), self._address, self._staging.nbytes)
        if code == Code.NO_AVAILABLE_HANDLE:
            raise StoreFull("the Mooncake store is full, or no process gives it memory")
        if code != Code.OBJECT_ALREADY_EXISTS:
            _check(code, "store a block")

    def get(self, block_hash: bytes) -> Loaded:
        """Loads a block into the staging memory, and removes it from the store if it is not whole."""
        key = self._key(block_hash)
        num_bytes = self._store.get_into(key, self._address, self._staging.nbytes)
        if num_bytes in _MISSING:
            return "missing"
        if num_bytes != Code.INVALID_PARAMS:  # the value is longer than a record
            _check(num_bytes, "load a block")
            if num_bytes == self._staging.nbytes and self._is_whole(block_hash):
                return "loaded"
        self._store.remove(key, True)
        return "corrupt"

    def clear(self) -> None:
        """Removes all blocks of this identity."""
        _check(self._store.remove_by_regex(f"^{self._prefix}", True), "remove blocks")

    def _is_whole(self, block_hash: bytes) -> bool:
        header = self._format.parse_header(self._header)
        return isinstance(header, BlockHeader) and self._format.is_whole(header, block_hash, self._block)

    def _key(self, block_hash: bytes) -> str:
        return self._prefix + block_hash.hex()


def _check(code: int, action: str) -> None:
    """Raises StoreLost for an error code."""
    if code < 0:
        name = f"{Code(code).name} ({code})" if code in _KNOWN_CODES else f"error {code}"
        raise StoreLost(f"the Mooncake store failed to {action}: {name}")
