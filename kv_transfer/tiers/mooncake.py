"""The tier in a Mooncake store: memory of many hosts, shared by all workers that are given its master's address.

Workers give the store no memory; processes of Mooncake do (`mooncake_client`). The store evicts by itself and cannot
list its keys, so a worker knows the blocks that it has stored, found or loaded.
"""

from __future__ import annotations

import importlib.util
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tandem.kv_transfer.tiers.block_record import HEADER_BYTES
from tandem.kv_transfer.tiers.mooncake_blocks import StoreLost
from tandem.kv_transfer.tiers.mooncake_process import MooncakeConfig, MooncakeProcess
from tandem.kv_transfer.tiers.tier import ChangeLog
from tandem.runtime.errors import ConfigError

FIRST_RETRY_S, MAX_RETRY_S = 1.0, 30.0
"""Time without attempts to reach a lost store; it doubles with each failure."""
MAX_KNOWN_BLOCKS = 1 << 18
"""Limit on the blocks that a worker remembers (about 30 MB). Those beyond it count as removed until found again."""
_NO_BLOCK = bytes(16)
"""A hash that no block has."""


class MooncakeTier:
    """See `KVTier`. address: HOST:PORT of the master. identity: of the model, its layout and the rank.

    A store that fails is lost: its client is ended, and its blocks count as removed. Calls fail at once until the next
    attempt to connect is due. Raises ConfigError if Mooncake is not installed.
    """

    name = "store"
    max_bytes = 0

    def __init__(
        self,
        address: str,
        identity: bytes,
        block_bytes: int,
        connect: Callable[[MooncakeConfig], MooncakeProcess] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if connect is None:
            if importlib.util.find_spec("mooncake") is None:
                raise ConfigError("--kv-store needs Mooncake; install it: pip install tandem-serve[mooncake]")
            connect = MooncakeProcess
        self._config = MooncakeConfig(address, identity, block_bytes)
        self._connect = connect
        self._clock = clock
        self._client: MooncakeProcess | None = None
        self._reason = f"not connected to {address}"
        self._retry_at = clock()
        self._retry_s = FIRST_RETRY_S
        self._known: OrderedDict[bytes, None] = OrderedDict()  # the least recently seen first
        self.changes = ChangeLog()
        self.num_corrupt = 0

    @property
    def num_bytes(self) -> int:
        return len(self._known) * (HEADER_BYTES + self._config.block_bytes)

    def open(self) -> None:
        with self._using_client():
            pass

    def find(self, hashes: Sequence[bytes]) -> int:
        with self._using_client() as client:
            found = client.find(hashes)
        for block_hash, is_there in zip(hashes, found, strict=True):
            self._note(block_hash, is_there)
        return found.index(False) if False in found else len(found)

    def store(self, block_hash: bytes, block: memoryview) -> None:
        with self._using_client() as client:
            client.put(block_hash, block)
        self._note(block_hash, True)

    def load(self, block_hash: bytes, block: memoryview) -> bool:
        with self._using_client() as client:
            outcome = client.get(block_hash, block)
        self.num_corrupt += outcome == "corrupt"
        self._note(block_hash, outcome == "loaded")
        return outcome == "loaded"

    def refresh(self) -> None:
        """Notices that the store is lost, or is back. Raises TierFailed while it is lost."""
        self.find([_NO_BLOCK])

    def clear(self) -> None:
        with self._using_client() as client:
            client.clear()
        self._forget_all()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    @contextmanager
    def _using_client(self) -> Iterator[MooncakeProcess]:
        """Yields a connected client. Raises StoreLost if there is none, and gives it up if the block raises that."""
        if self._client is None and self._clock() < self._retry_at:
            raise StoreLost(self._reason)
        try:
            if self._client is None:
                self._client = self._connect(self._config)
            yield self._client
            self._retry_s = FIRST_RETRY_S
        except StoreLost as error:
            self.close()
            self._forget_all()
            self._reason = str(error)
            self._retry_at = self._clock() + self._retry_s
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            raise

    def _note(self, block_hash: bytes, is_there: bool) -> None:
        if not is_there:
            self._forget(block_hash)
            return
        if block_hash not in self._known:
            self._known[block_hash] = None
            self.changes.add(block_hash)
        self._known.move_to_end(block_hash)
        if len(self._known) > MAX_KNOWN_BLOCKS:
            self._forget(next(iter(self._known)))

    def _forget(self, block_hash: bytes) -> None:
        if block_hash in self._known:
            del self._known[block_hash]
            self.changes.remove(block_hash)

    def _forget_all(self) -> None:
        for block_hash in list(self._known):
            self._forget(block_hash)
