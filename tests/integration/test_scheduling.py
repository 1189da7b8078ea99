"""Prefix cache, preemption and shared prompts in real clusters: equal outputs for less computation and transfer."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tandem.protocol.messages.membership import WorkerLoad
from tandem.worker.presence import HEARTBEAT_INTERVAL_S
from tests.support.cluster import Cluster

BLOCK_SIZE = 16
NUM_BLOCKS = 48
"""Blocks for one and a half sequences of 512 tokens. float32, so that all routes give one text."""


@pytest.fixture(scope="module")
def block_bytes(noise_model: Path) -> int:
    config = json.loads((noise_model / "config.json").read_text())
    num_vectors = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * BLOCK_SIZE
    return int(4 * num_vectors * config["head_dim"])


class Small:
    """A cluster with a small pool."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def complete(self, prompt: list[int], num_tokens: int, **fields: Any) -> list[list[int]]:
        content = self._cluster.complete(60, prompt=prompt, max_tokens=num_tokens, **fields)
        choices = sorted(content["choices"], key=lambda choice: choice["index"])
        assert content["usage"]["completion_tokens"] == num_tokens * len(choices)
        return [choice["token_ids"] for choice in choices]

    def load(self, worker_id: str = "prefill-0") -> WorkerLoad:
        """Returns the load once the cluster is idle."""
        asked_at = time.monotonic() + HEARTBEAT_INTERVAL_S  # skip reports that were in flight
        self._cluster.wait_for(
            lambda: time.monotonic() - self._cluster.worker(worker_id).silence_s > asked_at, timeout_s=5
        )
        self._cluster.wait_for(self._cluster.all_blocks_free, 10)
        return self._cluster.worker(worker_id).load


@pytest.fixture(scope="module")
def small(block_bytes: int) -> Iterator[Small]:
    with Cluster(
        "--dtype", "float32", "--max-model-len", "512", "--block-size", str(BLOCK_SIZE),
        "--kv-cache-gib", str((NUM_BLOCKS + 0.5) * block_bytes / 2**30),
    ) as cluster:  # fmt: skip
        cluster.wait_for(lambda: {r.load.num_blocks for r in cluster.status().workers} == {NUM_BLOCKS}, 10)
        yield Small(cluster)


def random_prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 2048) for _ in range(length)]


@pytest.mark.timeout(600)
def test_preemption_does_not_change_outputs(small: Small) -> None:
    """Eight sequences of up to 300 tokens where 768 fit, greedy and seeded, compared with runs alone."""
    wanted: list[tuple[list[int], dict[str, Any]]] = [
        (random_prompt(i, 20 + 10 * i), {"temperature": 1.0 if i % 2 else 0, "seed": i}) for i in range(8)
    ]
    alone = [small.complete(prompt, 200, **fields) for prompt, fields in wanted]
    assert small.load("decode-0").num_preempted == 0
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda w: small.complete(w[0], 200, **w[1]), wanted))
    assert together == alone
    assert small.load("decode-0").num_preempted > 0


def test_a_second_turn_ships_only_new_blocks(small: Small, block_bytes: int) -> None:
    prompt = random_prompt(100, 160)
    [first_answer] = small.complete(prompt, 50)
    before = small.load()
    second = prompt + first_answer + random_prompt(101, 20)
    small.complete(second, 4)
    after = small.load()
    # Decode has computed all but the last token that it chose: 160 + 49 tokens are 13 full blocks of 16.
    num_shipped = -(-len(second) // BLOCK_SIZE) - (160 + 49) // BLOCK_SIZE
    assert after.num_transferred_bytes - before.num_transferred_bytes == num_shipped * block_bytes
    assert after.num_cached_tokens - before.num_cached_tokens == 160  # prefill has only the prompt


@pytest.mark.parametrize("length", [32, 41])
def test_n_sequences_are_prefilled_and_shipped_once(small: Small, block_bytes: int, length: int) -> None:
    """The prompt may end within a block, which each sequence then copies."""
    prompt = random_prompt(200 + length, length)
    before = small.load()
    together = small.complete(prompt, 40, n=4, temperature=1.0, seed=7)
    after = small.load()
    num_shipped = -(-length // BLOCK_SIZE)
    assert after.num_transferred_bytes - before.num_transferred_bytes == num_shipped * block_bytes
    assert after.num_prompt_tokens - before.num_prompt_tokens == length
    assert together == [small.complete(prompt, 40, temperature=1.0, seed=7 + i)[0] for i in range(4)]
    assert len({tuple(tokens) for tokens in together}) == 4
