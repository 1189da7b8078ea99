"""The host memory tier: blocks in a memory file that outlives the worker.

The file begins with a table of all headers, padded to whole pages, followed by the blocks in the same order. So opening
reads the table only, and touches none of the pages of blocks. A worker that is killed leaves at most one block
incomplete, with an invalid header. Blocks are verified when they are loaded.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tandem.kv_transfer.tiers.block_record import HEADER_BYTES, BlockFormat, BlockHeader, write_last_use
from tandem.kv_transfer.tiers.tier import ChangeLog, TierFailed

Pin = Callable[[npt.NDArray[np.uint8]], Callable[[], None]]
"""Locks memory in place, so that a device can copy from and to it, and returns what undoes it. Raises TierFailed."""
_NO_HEADER = memoryview(bytes(HEADER_BYTES))


class HostMemoryTier:
    """See `KVTier`. path: a memfd of `num_bytes` (`/proc/PID/fd/N`), grown if it is smaller, used by nobody else.

    Pages are allocated when first written, or all at once if pinned. The file must not be on a file system that can run
    full, because a write to a page that cannot be allocated kills the process (SIGBUS).

    Evicts the least recently used block, also after a restart: each header has a use counter.

    With `pin`, a device may write to the memory of `room_for` and read that of `whole`.
    """

    name = "host"

    def __init__(self, path: str, num_bytes: int, identity: bytes, block_bytes: int, pin: Pin | None = None) -> None:
        self._path = path
        self._format = BlockFormat(identity, block_bytes)
        self.max_bytes = num_bytes
        self._num_slots = (num_bytes - mmap.PAGESIZE + 1) // self._format.record_bytes
        table_bytes = self._num_slots * HEADER_BYTES
        self._first_block = table_bytes + -table_bytes % mmap.PAGESIZE
        self._bytes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._pin = pin
        self._unpin: Callable[[], None] = lambda: None
        self._pin_error = ""  # why it could not be pinned
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by block hash, least recently used first
        self._free: list[int] = []
        self._num_uses = 0
        self.num_corrupt = 0
        self.changes = ChangeLog()

    @property
    def is_pinned(self) -> bool:
        return self._pin is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks stored, with their headers."""
        return len(self._slots) * self._format.record_bytes

    def open(self) -> None:
        """Maps the memory and finds the blocks in it. Raises TierFailed if it cannot be mapped or holds no block.

        Memory that could not be pinned is not pinned again, because that would allocate all of it while requests run.
        """
        if self._pin_error:
            raise TierFailed(self._pin_error)
        if self._num_slots < 1:
            raise TierFailed(
                f"{self.max_bytes} bytes of host memory hold no KV block of {self._format.block_bytes} bytes: give the "
                "tier more"
            )
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_size < self.max_bytes:
                    os.ftruncate(fd, self.max_bytes)
                self._bytes = np.frombuffer(mmap.mmap(fd, self.max_bytes), np.uint8)
            finally:
                os.close(fd)
        except OSError as error:
            raise TierFailed(f"cannot map the host memory tier {self._path}: {error.strerror}") from error
        if self._pin is not None:
            try:
                self._unpin = self._pin(self._bytes)
            except TierFailed as error:
                self._bytes, self._pin_error = np.empty(0, np.uint8), str(error)
                raise
        self._recover()

    def _recover(self) -> None:
        """Finds the blocks whose headers are whole, and numbers their uses anew from 1 on, in the same order."""
        found: list[tuple[int, int, bytes]] = []  # last use, slot, block hash
        for slot in range(self._num_slots):
            header = self._format.parse_header(self._header(slot))
            if isinstance(header, BlockHeader):
                found.append((header.last_use, slot, header.block_hash))
        for _, slot, block_hash in sorted(found):
            self._slots[block_hash] = slot
            self._use(block_hash)
        used = set(self._slots.values())
        self._free = [slot for slot in reversed(range(self._num_slots)) if slot not in used]
        for block_hash in self._slots:
            self.changes.add(block_hash)

    def find(self, hashes: Sequence[bytes]) -> int:
        return next((n for n, block_hash in enumerate(hashes) if block_hash not in self._slots), len(hashes))

    def store(self, block_hash: bytes, block: memoryview) -> None:
        if self.room_for(block_hash) is not None:
            header = self._format.make_header(block_hash, block)
            self._write(self._block_offset(self._free[-1]), block)
            self._add(block_hash, header)

    def room_for(self, block_hash: bytes) -> npt.NDArray[np.uint8] | None:
        """Returns memory for a block, which `keep` adds to the tier; None if the block is there."""
        if block_hash in self._slots:
            self._use(block_hash)
            return None
        if not self._free:
            self._remove(next(iter(self._slots)))
        slot = self._free[-1]
        # The order protects from SIGKILL: while the block is being written, no header claims that it is there.
        self._write(slot * HEADER_BYTES, _NO_HEADER)
        return self._memory(slot)

    def keep(self, block_hash: bytes) -> None:
        """Adds the block that has been written to the memory of the last `room_for`."""
        self._add(block_hash, self._format.make_header(block_hash, self._memory(self._free[-1]).data))

    def _add(self, block_hash: bytes, header: bytes) -> None:
        slot = self._free[-1]
        self._write(slot * HEADER_BYTES, memoryview(header))
        self._free.pop()
        self._slots[block_hash] = slot
        self._use(block_hash)
        self.changes.add(block_hash)

    def load(self, block_hash: bytes, block: memoryview) -> bool:
        if (slot := self._slots.get(block_hash)) is None:
            return False
        np.copyto(np.frombuffer(block, np.uint8), self._memory(slot))
        # The copy is verified, not the memory, so bytes that change in between cannot pass.
        return self._is_whole(block_hash, block)

    def whole(self, block_hash: bytes) -> npt.NDArray[np.uint8] | None:
        """Returns a block's memory, valid until the next call; None if the block is not there or is not whole."""
        if (slot := self._slots.get(block_hash)) is None:
            return None
        memory = self._memory(slot)
        return memory if self._is_whole(block_hash, memory.data) else None

    def _is_whole(self, block_hash: bytes, block: memoryview) -> bool:
        """Compares a block with its header. Removes it if they disagree."""
        header = self._format.parse_header(self._header(self._slots[block_hash]))
        if isinstance(header, BlockHeader) and self._format.is_whole(header, block_hash, block):
            self._use(block_hash)
            return True
        self.num_corrupt += 1
        self._remove(block_hash)
        return False

    def refresh(self) -> None:
        """Does nothing: nobody else writes to the memory."""

    def clear(self) -> None:
        self._bytes[: self._first_block] = 0
        for block_hash in self._slots:
            self.changes.remove(block_hash)
        self._slots.clear()
        self._free = list(reversed(range(self._num_slots)))

    def close(self) -> None:
        """Unmaps the memory. The blocks stay in it."""
        self._unpin()
        self._unpin = lambda: None
        self._bytes = np.empty(0, np.uint8)
        self._slots.clear()

    def _remove(self, block_hash: bytes) -> None:
        slot = self._slots.pop(block_hash)
        self._write(slot * HEADER_BYTES, _NO_HEADER)
        self._free.append(slot)
        self.changes.remove(block_hash)

    def _use(self, block_hash: bytes) -> None:
        """Makes a block the most recently used one."""
        self._num_uses += 1
        self._slots.move_to_end(block_hash)
        write_last_use(self._header(self._slots[block_hash]), self._num_uses)

    def _header(self, slot: int) -> memoryview:
        return self._bytes[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES].data

    def _memory(self, slot: int) -> npt.NDArray[np.uint8]:
        begin = self._block_offset(slot)
        return self._bytes[begin : begin + self._format.block_bytes]

    def _block_offset(self, slot: int) -> int:
        return self._first_block + slot * self._format.block_bytes

    def _write(self, offset: int, data: memoryview) -> None:
        """Copies into the memory. numpy releases the GIL for it."""
        np.copyto(self._bytes[offset : offset + data.nbytes], np.frombuffer(data, np.uint8))
