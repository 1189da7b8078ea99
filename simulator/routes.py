"""Compares what a router expects of the workers that it has chosen with what it knows of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tandem.protocol.prefix_hash import unpack_short_hashes
from tandem.proxy.cluster.router import Route
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.dispatch.sequence import DispatchedSequence


def wrong_route(table: WorkerTable, sequences: Sequence[DispatchedSequence], route: Route) -> str | None:
    """Returns what is wrong with a route that was chosen just now for these sequences of one prompt, or None."""
    prompt, num_generated = sequences[0].prompt, len(sequences[0].generated)
    prefill = table._by_epoch.get(route.prefill.epoch)
    decode = table._by_epoch.get(route.decode.epoch) if route.decode is not None else None
    if prefill is None or (route.decode is not None and decode is None):
        return "a worker that is not known"
    if decode is not None and decode is not prefill and not prefill.pairs.is_ready(decode.worker.epoch):
        return f"no pair from {prefill.worker.worker_id} to {decode.worker.worker_id}"
    can_be_cached = bool(num_generated) or prompt.num_prompt_logprobs is None
    hashes = unpack_short_hashes(prompt.prefix_hashes) if can_be_cached else ()
    pool, tiers = table.prefixes._workers, table.tier_prefixes._workers
    num_tokens, size = prompt.num_tokens + num_generated, table.block_size
    in_pool, in_all = _depth(hashes, prefill.bit, pool), _depth(hashes, prefill.bit, pool, tiers)
    if in_pool is not None and in_all is not None:
        most = (num_tokens - 1) // size
        num_loaded = size * (min(in_all, most) - min(in_pool, most))
        num_computed = num_tokens - size * min(in_all, most)
        expected = num_computed + math.ceil(num_loaded * prefill.use.load_cost)
        if route.num_uncached_tokens != expected:
            return f"{route.num_uncached_tokens} tokens to compute instead of {expected}"
    num_held = _depth(hashes, decode.bit, pool) if decode is not None else None
    if num_held is not None:
        num_full = num_tokens // size
        num_own = (num_tokens + size) // size - num_full
        expected = max(0, num_full - num_held) + len(sequences) * num_own
        if route.num_blocks != expected:
            return f"{route.num_blocks} blocks are promised instead of {expected}"
    return None


def _depth(hashes: Sequence[int], bit: int, *indices: dict[int, int]) -> int | None:
    """Returns how many leading blocks a worker has in these indices; None if it has others behind a missing one."""
    has = [any(index.get(each, 0) >> bit & 1 for index in indices) for each in hashes]
    depth = has.index(False) if False in has else len(has)
    return None if any(has[depth:]) else depth
