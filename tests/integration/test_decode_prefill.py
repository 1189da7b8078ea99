"""Decode workers answer prompts exactly as prefill workers do, also after the last prefill worker has died."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.support.cluster import Cluster

SHORT = [7 * i % 500 + 4 for i in range(20)]
LONG = [11 * i % 900 + 4 for i in range(700)]
BODIES: list[dict[str, Any]] = [
    {"prompt": SHORT, "max_tokens": 8, "temperature": 0},
    {"prompt": [SHORT, LONG], "max_tokens": 6, "n": 3, "seed": 5, "temperature": 1.0, "top_p": 0.9},
    {"prompt": LONG, "max_tokens": 5, "temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    {"prompt": LONG[:65], "max_tokens": 5, "temperature": 0.7, "seed": 3, "repetition_penalty": 1.3},
    {
        "prompt": SHORT,
        "max_tokens": 12,
        "n": 2,
        "temperature": 1.0,
        "seed": 1,
        "structured_outputs": {"choice": ["alpha", "beta and more"]},
        "ignore_eos": False,
    },
    {"prompt": SHORT, "max_tokens": 1, "temperature": 0, "n": 2, "logprobs": 1},
]


def ask(cluster: Cluster, body: dict[str, Any]) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = cluster.complete(**body)["choices"]
    return choices


def token_ids(choices: list[dict[str, Any]]) -> list[list[int]]:
    return [choice["token_ids"] for choice in choices]


def logprobs(choices: list[dict[str, Any]]) -> list[float]:
    found = [choice["logprobs"]["token_logprobs"] for choice in choices if choice.get("logprobs")]
    for choice in choices:
        for entry in choice.get("prompt_logprobs") or []:
            found.append([token["logprob"] for token in (entry or {}).values()])
    return [value for values in found for value in values if value is not None]


def num_finished(cluster: Cluster) -> dict[str, int]:
    return {report.worker.worker_id: report.load.num_finished for report in cluster.status().workers}


@pytest.mark.timeout(600)
def test_decode_prefill_gives_equal_answers_and_survives_the_last_prefill_worker(float32_cluster: Cluster) -> None:
    options = ("--dtype", "float32", "--max-num-batched-tokens", "128")
    before = float32_cluster.worker("decode-0").load.num_transferred_bytes
    usual = [ask(float32_cluster, body) for body in BODIES]
    float32_cluster.wait_for(lambda: float32_cluster.worker("decode-0").load.num_transferred_bytes > before)
    with Cluster(*options, "--decode-prefill-threshold", "2000") as cluster:
        # Requests for a single token still go to prefill, which then has nothing to transfer.
        local = [ask(cluster, body) for body in BODIES]
        cluster.wait_for(lambda: sum(num_finished(cluster).values()) == sum(map(len, local)))
        assert num_finished(cluster)["prefill-0"] == 2
        assert cluster.worker("decode-0").load.num_transferred_bytes == 0
        for body, here, there in zip(BODIES, local, usual, strict=True):
            assert token_ids(here) == token_ids(there), body
            assert logprobs(here) == pytest.approx(logprobs(there), abs=1e-3), body
        ask(cluster, BODIES[0] | {"prompt": LONG})
        cluster.wait_for(
            lambda: cluster.worker("decode-0").load.num_cached_tokens >= 640
        )  # prefixes that it computed itself
        cluster.wait_for(cluster.all_blocks_free)
        os.kill(cluster.launcher_pid, signal.SIGSTOP)  # starts no other prefill worker
        try:
            os.kill(cluster.worker("prefill-0").worker.pid, signal.SIGKILL)
            cluster.wait_for(lambda: all(r.worker.role == "decode" for r in cluster.status().workers))
            assert cluster.is_healthy()
            again = [ask(cluster, body) for body in BODIES]
            assert all(r.worker.role == "decode" for r in cluster.status().workers)
        finally:
            os.kill(cluster.launcher_pid, signal.SIGCONT)
        assert [token_ids(choices) for choices in again] == [token_ids(choices) for choices in usual]
        cluster.wait_for(cluster.all_blocks_free)
