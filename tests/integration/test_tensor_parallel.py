"""Greedy output of tensor-parallel workers equals that of transformers' `generate` in float32, in every role."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, children_of, is_alive, is_copy, refused_start
from tests.support.greedy import continuation, load_reference, random_prompts

NUM_NEW_TOKENS = 16
LENGTHS = [1, 63, 64, 129, 300, 700]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, seed=11)


@pytest.fixture(scope="module")
def expected(noise_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = load_reference(noise_model)
    return [continuation(model, prompt, NUM_NEW_TOKENS) for prompt in prompts]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("prefill_size", "decode_size", "connector"),
    [
        pytest.param(2, 1, "gloo", marks=pytest.mark.extended),
        pytest.param(1, 2, "tcp"),
        pytest.param(2, 2, "ipc", marks=pytest.mark.extended),
    ],
)
def test_greedy_output_matches_transformers(
    prefill_size: int, decode_size: int, connector: str, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    arguments = [
        "--prefill-tensor-parallel-size", str(prefill_size), "--decode-tensor-parallel-size", str(decode_size),
        "--kv-connector", connector, "--dtype", "float32", "--threads-per-worker", "1", "--kv-cache-gib", "0.1",
    ]  # fmt: skip
    with Cluster(*arguments, "--max-num-batched-tokens", "256") as cluster:

        def complete_all(salt: str) -> list[list[int]]:
            with ThreadPoolExecutor(len(prompts)) as pool:
                ask = partial(cluster.token_ids, max_tokens=NUM_NEW_TOKENS, cache_salt=salt)
                return list(pool.map(ask, prompts))

        assert complete_all("as started") == expected
        pairs = [pair for report in cluster.status().workers for pair in report.pairs]
        assert [(pair.connector, pair.state) for pair in pairs] == [(connector, "ready")]
        sizes = {report.worker.role: report.worker.num_ranks for report in cluster.status().workers}
        assert sizes == {"prefill": prefill_size, "decode": decode_size}
        leaders = [report.worker.pid for report in cluster.status().workers]
        followers = [pid for leader in leaders for pid in children_of(leader)]
        assert len(followers) == prefill_size + decode_size - 2
        assert all(is_copy(pid, leaders[0]) for pid in (*leaders, *followers)), "all ranks are forked"

        assert not cluster.give_role("decode-0", "any") and not cluster.give_role("prefill-0", "any")
        cluster.wait_for(lambda: len(cluster.ready_pairs()) == 2)
        assert complete_all("elastic") == expected
        assert not cluster.give_role("prefill-0", "decode") and not cluster.give_role("decode-0", "prefill")
        num_bytes = cluster.worker("decode-0").load.num_transferred_bytes
        assert complete_all("exchanged") == expected
        cluster.wait_for(lambda: cluster.worker("decode-0").load.num_transferred_bytes > num_bytes)
        cluster.wait_for(cluster.all_blocks_free)
    assert not [pid for pid in followers if is_alive(pid)], "a follower is still running"


@pytest.mark.timeout(600)
def test_unsupported_size_is_refused_with_one_line() -> None:
    """The noise model has 4 attention heads and 2 key-value heads."""
    message = refused_start("--decode-tensor-parallel-size", "3").splitlines()[-1]
    assert message.startswith("tandem: ") and message.endswith("--tensor-parallel-size may be 1 or 2")
