"""Which worker holds which KV blocks, as the workers tell it. Pure; `PrefixIndex.depths` is on every request's path.

One table maps each block's short hash to the set of workers that hold it, as the bits of one number. A worker that has
a block of a prompt has, but for rare evictions, all blocks before it; so the longest prefixes of all workers are found
by bisection over sets of workers, not worker by worker and block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tandem.protocol.messages.membership import PrefixUpdate
from tandem.protocol.prefix_hash import unpack_short_hashes

_RESOLUTION = 32
"""Depths but the greatest are found to this part of the prompt."""
MAX_SINGLED_OUT = 6
"""Workers. Where more hold parts of many lengths, at least so many of the longest are told apart, and the others taken
for as short as the shortest of them."""
MAX_BLOCKS_PER_WORKER = 4_000_000


@dataclass(slots=True)
class _Holder:
    bit: int
    held: set[int] = field(default_factory=set)
    last_number: int | None = None  # None: what it holds is not known


class Depths(msgspec.Struct, frozen=True):
    """Leading blocks of a prompt that each worker holds, at least. common: of all whose bit is not in `other`.

    groups: how many workers, their blocks, and which they are; those with the most blocks first.
    """

    common: int
    other: dict[int, int]
    groups: list[tuple[int, int, int]]

    def of(self, bit: int) -> int:
        return self.other.get(bit, self.common)


NO_DEPTHS = Depths(0, {}, [(0, 0, 0)])


class PrefixIndex:
    def __init__(self) -> None:
        self._workers: dict[int, int] = {}  # short hash to the bits of those who hold it
        self._holders: dict[str, _Holder] = {}  # by epoch
        self._all = 0

    def join(self, epoch: str) -> int:
        """The number of the worker's bit, which stays its own until it leaves."""
        bit = (~self._all & (self._all + 1)).bit_length() - 1  # the lowest that is free
        self._all |= 1 << bit
        self._holders[epoch] = _Holder(bit)
        return bit

    def leave(self, epoch: str) -> None:
        holder = self._holders.pop(epoch)
        self._forget(holder)
        self._all &= ~(1 << holder.bit)

    def apply(self, epoch: str, update: PrefixUpdate) -> None:
        """An update after a gap is of no use; `has_missed` then asks for a restart."""
        holder = self._holders[epoch]
        if update.restart:
            self._forget(holder)
        elif holder.last_number is None or update.number != holder.last_number + 1:
            self._forget(holder)
            holder.last_number = None
            return
        holder.last_number = update.number
        mask = 1 << holder.bit
        for block_hash in unpack_short_hashes(update.evicted):
            self._remove(block_hash, mask)
            holder.held.discard(block_hash)
        workers = self._workers
        for block_hash in unpack_short_hashes(update.added):
            workers[block_hash] = workers.get(block_hash, 0) | mask
            holder.held.add(block_hash)
        if len(holder.held) > MAX_BLOCKS_PER_WORKER:  # no pool has so many: the worker tells no truth
            self._forget(holder)
            holder.last_number = None

    def has_missed(self, epoch: str) -> bool:
        holder = self._holders.get(epoch)
        return holder is not None and holder.last_number is None

    def depths(self, hashes: Sequence[int]) -> Depths:
        """For the short hashes of a prompt's full blocks, in order. Of each worker `depth` is the exact one."""
        workers = self._workers
        here = workers.get(hashes[0], 0) if hashes else 0
        if not here:
            return NO_DEPTHS
        groups: list[tuple[int, int, int]] = []
        unsettled = [(1, len(hashes), here)]
        resolution = num_told_apart = 0  # the longest prefix is found exactly
        while unsettled and num_told_apart < MAX_SINGLED_OUT:
            low, high, mask = unsettled.pop()  # they hold `low` blocks and at most `high`
            while high - low > resolution:
                middle = (low + high + 1) // 2
                deeper = workers.get(hashes[middle - 1], 0) & mask
                if not deeper:
                    high = middle - 1
                    continue
                if deeper != mask:  # the others wait: the longest prefixes matter most
                    unsettled.append((low, middle - 1, mask & ~deeper))
                low, mask = middle, deeper
            num_told_apart += mask.bit_count()
            groups.append((mask.bit_count(), low, mask))
            resolution = len(hashes) // _RESOLUTION
        if unsettled:
            depth, mask = self._held_by_all(hashes, unsettled, resolution)
            groups.append((mask.bit_count(), depth, mask))
        if here != self._all:
            mask = self._all & ~here
            groups.append((mask.bit_count(), 0, mask))
        # Bits are taken out of their sets for all groups but the largest, since that costs most.
        largest = max(groups)
        other: dict[int, int] = {}
        for group in groups:
            if group is largest:
                continue
            _, depth, mask = group
            while mask:
                bit = mask.bit_length() - 1
                other[bit] = depth
                mask ^= 1 << bit
        return Depths(largest[1], other, groups)

    def _held_by_all(
        self, hashes: Sequence[int], unsettled: list[tuple[int, int, int]], resolution: int
    ) -> tuple[int, int]:
        """What all of these workers hold, and which they are."""
        mask = 0
        for _, _, some in unsettled:
            mask |= some
        low, high = min(low for low, _, _ in unsettled), min(high for _, high, _ in unsettled)
        while high - low > resolution:
            middle = (low + high + 1) // 2
            if mask & ~self._workers.get(hashes[middle - 1], 0):
                high = middle - 1
            else:
                low = middle
        return low, mask

    def depth(self, hashes: Sequence[int], bit: int, at_least: int) -> int:
        """How many leading blocks this one worker holds; at_least: as `depths` says."""
        workers, low, high = self._workers, at_least, len(hashes)
        if not workers.get(hashes[0], 0) >> bit & 1:
            return 0  # its beginning was evicted, if it holds more of it
        while low < high:
            middle = (low + high + 1) // 2
            if workers.get(hashes[middle - 1], 0) >> bit & 1:
                low = middle
            else:
                high = middle - 1
        return low

    def _forget(self, holder: _Holder) -> None:
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
