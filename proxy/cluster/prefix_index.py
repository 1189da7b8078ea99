"""Index of which worker holds which KV blocks, fed by the workers' prefix updates. Pure.

One table maps the short hash of a block to the set of workers that hold it, stored as the bits of one integer. A
worker that holds a block of a prompt also holds the blocks before it, except after rare evictions. So the longest
cached prefix of every worker can be found by bisection over sets of workers instead of block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.protocol.messages.membership import PrefixUpdate
from tandem.protocol.prefix_hash import unpack_short_hashes

MAX_BLOCKS_PER_WORKER = 4_000_000
"""Blocks that one worker may report. No KV pool is that large, so a worker that exceeds it is faulty."""


@dataclass(slots=True)
class _Holder:
    """Blocks of one worker.

    last_number: of its last update; None while its blocks are unknown. has_missed: an update was missed. False before
    the first one: a worker may send none.
    """

    bit: int
    held: set[int] = field(default_factory=set)
    last_number: int | None = None
    has_missed: bool = False

    def miss(self) -> None:
        self.last_number, self.has_missed = None, True


class PrefixIndex:
    """Indices to which the same workers join, and from which they leave, in the same order give them the same bits."""

    def __init__(self) -> None:
        self._workers: dict[int, int] = {}  # short block hash -> bits of the workers that hold the block
        self._holders: dict[str, _Holder] = {}  # by epoch
        self._used_bits = 0

    def join(self, epoch: str) -> int:
        """Adds a worker and returns the number of its bit, which it keeps until it leaves."""
        bit = (~self._used_bits & (self._used_bits + 1)).bit_length() - 1  # the lowest free bit
        self._used_bits |= 1 << bit
        self._holders[epoch] = _Holder(bit)
        return bit

    def leave(self, epoch: str) -> None:
        holder = self._holders.pop(epoch)
        self._clear(holder)
        self._used_bits &= ~(1 << holder.bit)

    def apply(self, epoch: str, update: PrefixUpdate) -> None:
        """Applies an update. After a gap in the numbers the blocks are unknown until the next restart."""
        holder = self._holders[epoch]
        if update.restart:
            self._clear(holder)
        elif holder.last_number is None or update.number != holder.last_number + 1:
            self._clear(holder)
            holder.miss()
            return
        holder.last_number, holder.has_missed = update.number, False
        mask = 1 << holder.bit
        for block_hash in unpack_short_hashes(update.evicted):
            self._remove(block_hash, mask)
            holder.held.discard(block_hash)
        for block_hash in unpack_short_hashes(update.added):
            self._workers[block_hash] = self._workers.get(block_hash, 0) | mask
            holder.held.add(block_hash)
        if len(holder.held) > MAX_BLOCKS_PER_WORKER:
            self._clear(holder)
            holder.miss()

    def needs_restart(self, epoch: str) -> bool:
        """Whether the worker must report all its blocks again, because an update was missed."""
        holder = self._holders.get(epoch)
        return holder is not None and holder.has_missed

    @property
    def is_empty(self) -> bool:
        return not self._workers

    def depths(self, hashes: Sequence[int], below: PrefixIndex | None = None) -> dict[int, int]:
        """Number of leading blocks of a prompt that each worker holds, by the worker's bit. Absent means none.

        hashes: short hashes of the prompt's full blocks, in order. below: an index with the same bits; a worker also
        holds the blocks that it has there.
        """
        workers, others = self._workers, below._workers if below is not None else {}
        found: dict[int, int] = {}
        pending = [(1, len(hashes), workers.get(hashes[0], 0) | others.get(hashes[0], 0))] if hashes else []
        while pending:
            low, high, mask = pending.pop()  # each worker in `mask` holds at least `low` blocks and at most `high`
            while low < high and mask:
                middle = (low + high + 1) // 2
                block_hash = hashes[middle - 1]
                deeper = (workers.get(block_hash, 0) | others.get(block_hash, 0)) & mask
                if not deeper:
                    high = middle - 1
                    continue
                if deeper != mask:
                    pending.append((low, middle - 1, mask & ~deeper))
                low, mask = middle, deeper
            while mask:
                bit = mask.bit_length() - 1
                found[bit] = low
                mask ^= 1 << bit
        return found

    def _clear(self, holder: _Holder) -> None:
        mask = 1 << holder.bit
        for block_hash in holder.held:
            self._remove(block_hash, mask)
        holder.held.clear()

    def _remove(self, block_hash: int, mask: int) -> None:
        left = self._workers.get(block_hash, 0) & ~mask
        if left:
            self._workers[block_hash] = left
        else:
            self._workers.pop(block_hash, None)
