"""The next turn of a chat computes only its new tokens, wherever the last one ran."""

from __future__ import annotations

import time

from tandem.protocol.messages.membership import WorkerReport
from tests.support.cluster import Cluster

BLOCK_SIZE = 16
FIRST = [11 * i % 900 + 4 for i in range(320)]
NEW = [7 * i % 900 + 4 for i in range(100)]


def num_computed(cluster: Cluster) -> int:
    """Prompt tokens that all workers have computed, once each has reported again."""
    cluster.wait_for(cluster.all_blocks_free)
    asked_at = time.monotonic()
    workers: list[WorkerReport] = []

    def have_reported() -> bool:
        waited_s = time.monotonic() - asked_at
        workers[:] = cluster.status().workers
        return all(report.silence_s < waited_s for report in workers)

    cluster.wait_for(have_reported)
    loads = [report.load for report in workers]
    return sum(load.num_prompt_tokens - load.num_cached_tokens - load.num_received_tokens for load in loads)


def test_the_second_turn_computes_only_its_new_tokens() -> None:
    """The first turn is computed on one worker and generated on the other, because they have fixed roles until it ends.
    Both may compute the second turn."""
    options = ("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--kv-cache-gib", "0.1")
    with Cluster("--workers", "2", *options, "--decode-prefill-threshold", "64") as cluster:
        assert not cluster.give_role("worker-0", "prefill") and not cluster.give_role("worker-1", "decode")
        before = num_computed(cluster)
        first = cluster.token_ids(FIRST, 200)
        turn = FIRST + first + NEW
        computed_before = num_computed(cluster)
        assert computed_before - before == len(FIRST)
        assert sum(report.load.num_received_tokens for report in cluster.status().workers) == len(FIRST)
        assert not cluster.give_role("worker-0", "any") and not cluster.give_role("worker-1", "any")
        second = cluster.token_ids(turn, 8)
        computed = num_computed(cluster) - computed_before
        # The answer's last token has no KV yet, and only whole blocks are shared.
        num_shared = (len(FIRST) + len(first) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert computed == len(turn) - num_shared < len(NEW) + BLOCK_SIZE + 1
        third = cluster.token_ids([*turn, *second, *NEW], 8)
        assert num_computed(cluster) - computed_before - computed < len(NEW) + BLOCK_SIZE + 8 and len(third) == 8
