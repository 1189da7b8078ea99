"""--kv-cache-dtype fp8: a prefill and a decode worker answer as one worker does that computes all by itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster import Cluster

PROMPTS = [[(7 + 4 * i) * j % 900 + 4 for j in range(length)] for i, length in enumerate((1, 64, 200, 700))]
OPTIONS = (
    "--kv-cache-dtype", "fp8", "--dtype", "float32", "--threads-per-worker", "1", "--kv-cache-gib", "0.1",
    "--max-num-batched-tokens", "256",
)  # fmt: skip


def ask(cluster: Cluster, prompt: list[int], **fields: Any) -> list[list[int]]:
    answer = cluster.complete(prompt=prompt, max_tokens=12, **fields)
    return [choice["token_ids"] for choice in answer["choices"]]


def ask_all(cluster: Cluster) -> list[list[list[int]]]:
    """The second round reads cached prefixes; several sequences of a prompt copy its last block."""
    return [
        *(ask(cluster, prompt) for prompt in PROMPTS * 2),
        ask(cluster, PROMPTS[2], n=3, temperature=1.0, seed=5),
    ]


@pytest.mark.timeout(600)
def test_two_workers_answer_as_one_does(float32_cluster: Cluster) -> None:
    with Cluster(*OPTIONS, env={"TANDEM_KV_CHECKSUMS": "1"}) as cluster:
        by_two = ask_all(cluster)
        decode = cluster.worker("decode-0").load
        assert decode.num_compared_blocks > 0 and decode.num_corrupt_blocks == 0
        num_blocks = decode.num_blocks
        cluster.wait_for(cluster.all_blocks_free)
    with Cluster(*OPTIONS, "--prefill", "0", "--decode-prefill-threshold", "2000") as cluster:
        assert ask_all(cluster) == by_two
        assert cluster.worker("decode-0").load.num_blocks == num_blocks
    assert ask_all(float32_cluster) != by_two, "nothing was rounded"
