"""Greedy output of real clusters equals that of transformers' `generate` in float32, token for token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.greedy import continuation, load_reference, random_prompts

NUM_NEW_TOKENS = 24
LENGTHS = [  # around block and chunk boundaries
    *(1, 2, 3, 5, 17, 63, 64, 65, 100, 127, 128, 129, 190, 256, 300, 333, 400, 512, 600, 777, 900, 1024, 1200, 1500)
]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, seed=5)


@pytest.fixture(scope="module")
def expected(noise_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = load_reference(noise_model)
    return [continuation(model, prompt, NUM_NEW_TOKENS) for prompt in prompts]


def complete_all(cluster: Cluster, prompts: list[list[int]]) -> list[list[int]]:
    """Returns the token ids of greedy continuations, 16 requests at a time."""

    def complete(prompt: list[int]) -> list[int]:
        answer = cluster.complete(200, prompt=prompt, max_tokens=NUM_NEW_TOKENS)
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == NUM_NEW_TOKENS
        token_ids: list[int] = answer["choices"][0]["token_ids"]
        return token_ids

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(complete, prompts))


def connectors(cluster: Cluster) -> set[str]:
    return {pair.connector for report in cluster.status().workers for pair in report.pairs}


@pytest.mark.timeout(600)
def test_shared_memory_and_short_chunks_match_transformers(
    float32_cluster: Cluster, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert complete_all(float32_cluster, prompts) == expected
    assert connectors(float32_cluster) == {"ipc"}
    float32_cluster.wait_for(float32_cluster.all_blocks_free)


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--prefill", "2", "--decode", "2", "--kv-connector", "tcp"], id="tcp-2-prefill-2-decode"),
        pytest.param(
            ["--kv-connector", "gloo", "--max-num-batched-tokens", "333"],
            id="gloo-chunks-of-333",
        ),
    ],
)
def test_other_topologies_match_transformers(
    arguments: list[str], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with Cluster("--dtype", "float32", *arguments) as cluster:
        assert complete_all(cluster, prompts) == expected
        assert connectors(cluster) == {next((name for name in ("tcp", "gloo") if name in arguments), "ipc")}
        cluster.wait_for(cluster.all_blocks_free)
        if "--decode" in arguments:
            transferred = [report.load.num_transferred_bytes for report in cluster.status().workers]
            assert all(transferred), "every worker served requests"
