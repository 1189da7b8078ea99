"""What the workers hold of one prompt, in their KV pools and in the tiers below, and what that saves. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.proxy.cluster.worker_record import WorkerRecord
from tandem.proxy.cluster.worker_table import WorkerTable


@dataclass(frozen=True, slots=True)
class HeldPrefixes:
    """The prefixes of a prompt of num_tokens, by the workers' bits. Workers without any are absent."""

    num_tokens: int
    num_blocks: dict[int, int]
    """Leading full blocks in the KV pool."""
    beyond_pool: dict[int, int]
    """Tokens beyond these, at least the last one, which is computed for its logits."""
    beyond_tiers: dict[int, int]
    """Tokens beyond the blocks in the pool and the tiers together, because a worker loads what its pool lacks."""

    def num_uncached(self, record: WorkerRecord) -> int:
        """Returns the tokens to compute on this worker, plus the tokens to load there times their cost, rounded up."""
        num_computed = self.beyond_tiers.get(record.bit, self.num_tokens)
        num_loaded = self.beyond_pool.get(record.bit, self.num_tokens) - num_computed
        return num_computed + math.ceil(num_loaded * record.use.load_cost) if num_loaded else num_computed

    def fewest_beyond(self) -> int:
        """Returns the fewest tokens that any worker has neither in its pool nor in its tiers."""
        return min(self.beyond_tiers.values(), default=self.num_tokens)


def find_held_prefixes(table: WorkerTable, num_tokens: int, hashes: Sequence[int]) -> HeldPrefixes:
    """hashes: short hashes of the prompt's full blocks, in order; empty for a prompt that must be computed."""
    num_blocks = table.prefixes.depths(hashes)
    beyond_pool = beyond_tiers = _num_beyond(num_tokens, table.block_size, num_blocks)
    if not table.tier_prefixes.is_empty:
        in_all = table.prefixes.depths(hashes, table.tier_prefixes)
        beyond_tiers = _num_beyond(num_tokens, table.block_size, in_all)
    return HeldPrefixes(num_tokens, num_blocks, beyond_pool, beyond_tiers)


def _num_beyond(num_tokens: int, block_size: int, num_blocks: dict[int, int]) -> dict[int, int]:
    most = (num_tokens - 1) // block_size
    return {bit: num_tokens - block_size * min(number, most) for bit, number in num_blocks.items()}
