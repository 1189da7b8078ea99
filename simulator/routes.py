"""Compares what a router expects of the workers that it has chosen with what it knows of them, and of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tandem.protocol.prefix_hash import unpack_short_hashes
from tandem.proxy.cluster.router import Route, Router
from tandem.proxy.cluster.worker_record import WorkerRecord
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.dispatch.sequence import DispatchedSequence

MUCH_LATER = 4.0
"""A prompt may go to a worker that computes it later than another by this factor at most: beside sequences workers have
half of their speed, and a worker that runs none is preferred by a third."""
NO_TIME_S = 0.01
MANY_MORE = 5
"""Sequences by which a decode worker may have more than one with as much room: a cached prompt outweighs some."""


def wrong_route(router: Router, sequences: Sequence[DispatchedSequence], route: Route) -> str | None:
    """Returns what is wrong with a route that was chosen just now for these sequences of one prompt, or None."""
    table = router._table
    prefill = table._by_epoch.get(route.prefill.epoch)
    decode = table._by_epoch.get(route.decode.epoch) if route.decode is not None else None
    if prefill is None or (route.decode is not None and decode is None):
        return "a worker that is not known"
    if decode is not None and decode is not prefill and not prefill.pairs.is_ready(decode.worker.epoch):
        return f"no pair from {prefill.worker.worker_id} to {decode.worker.worker_id}"
    hashes = _hashes(sequences)
    expected = _num_to_compute(table, sequences, hashes, prefill)
    if expected is not None and route.num_uncached_tokens != expected:
        return f"{route.num_uncached_tokens} tokens to compute instead of {expected}"
    num_held = _depth(hashes, decode.bit, table.prefixes._workers) if decode is not None else None
    if num_held is not None:
        expected = _num_blocks(table, sequences, num_held)
        if route.num_blocks != expected:
            return f"{route.num_blocks} blocks are promised instead of {expected}"
    return None


def better_route(router: Router, sequences: Sequence[DispatchedSequence], route: Route) -> str | None:
    """Returns which worker would have been much better in each respect than the one that was chosen just now, or None.

    All workers of the role were free to be chosen. Those that have not reported yet seem to have no blocks.
    """
    table = router._table
    prefill = table._by_epoch[route.prefill.epoch]
    num_proxies = router._num_proxies
    if not route.is_deflected:
        hashes = _hashes(sequences)
        own_s = _first_token_s(route, prefill, route.num_uncached_tokens, num_proxies * route.num_uncached_tokens)
        for other in table.paired_prefill_workers if route.decode is not None else table.prefill_workers:
            num_tokens = _num_to_compute(table, sequences, hashes, other)
            if other is prefill or num_tokens is None:
                continue
            other_s = _first_token_s(route, other, num_tokens, 0)
            if own_s > MUCH_LATER * other_s + NO_TIME_S:
                names = f"{prefill.worker.worker_id}, and {other.worker.worker_id}"
                return f"first token after {own_s:.3f} s on {names} after {other_s:.3f} s"
    if route.decode is None or (decode := table._by_epoch[route.decode.epoch]).role != "decode" or route.is_deflected:
        return None
    num_before = decode.use.num_sequences - num_proxies * len(sequences)
    num_needed = _num_blocks(table, sequences, 0)  # where nothing is cached
    for other in prefill.decode_peers.values():
        is_free = (
            other.use.num_free_blocks - num_needed >= decode.use.num_free_blocks
            and other.use.num_sequences + MANY_MORE <= num_before
        )
        if other.role == "decode" and is_free and other.load.num_blocks:
            names = f"{decode.worker.worker_id}, and {other.use.num_sequences} on {other.worker.worker_id}"
            return f"{num_before} sequences run on {names}"
    return None


def _hashes(sequences: Sequence[DispatchedSequence]) -> Sequence[int]:
    prompt = sequences[0].prompt
    can_be_cached = bool(sequences[0].generated) or prompt.num_prompt_logprobs is None
    return unpack_short_hashes(prompt.prefix_hashes) if can_be_cached else ()


def _num_blocks(table: WorkerTable, sequences: Sequence[DispatchedSequence], num_held: int) -> int:
    """Returns the blocks that a worker which holds so many of the prompt needs more until each sequence has a token."""
    num_tokens, size = sequences[0].prompt.num_tokens + len(sequences[0].generated), table.block_size
    num_full = num_tokens // size
    num_own = (num_tokens + size) // size - num_full
    return max(0, num_full - num_held) + len(sequences) * num_own


def _num_to_compute(
    table: WorkerTable, sequences: Sequence[DispatchedSequence], hashes: Sequence[int], record: WorkerRecord
) -> int | None:
    """Returns the tokens that a worker computes, and those that it loads times their cost; None if it has gaps."""
    pool, tiers = table.prefixes._workers, table.tier_prefixes._workers
    num_tokens, size = sequences[0].prompt.num_tokens + len(sequences[0].generated), table.block_size
    in_pool, in_all = _depth(hashes, record.bit, pool), _depth(hashes, record.bit, pool, tiers)
    if in_pool is None or in_all is None:
        return None
    most = (num_tokens - 1) // size
    num_loaded = size * (min(in_all, most) - min(in_pool, most))
    return num_tokens - size * min(in_all, most) + math.ceil(num_loaded * record.use.load_cost)


def _first_token_s(route: Route, record: WorkerRecord, num_tokens: int, num_own: int) -> float:
    """Returns the seconds in which a worker computes a prompt and those ahead of it. num_own: of the prompt."""
    prompts = record.use.prompts
    counts = [*prompts._own.items(), *prompts._others.items()]
    ahead = sum(count for level, count in counts if level <= route.priority) - num_own
    return (ahead + num_tokens) / record.use.tokens_per_s


def _depth(hashes: Sequence[int], bit: int, *indices: dict[int, int]) -> int | None:
    """Returns how many leading blocks a worker has in these indices; None if it has others behind a missing one."""
    has = [any(index.get(each, 0) >> bit & 1 for index in indices) for each in hashes]
    depth = has.index(False) if False in has else len(has)
    return None if any(has[depth:]) else depth
