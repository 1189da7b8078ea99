"""`tandem cache clear` on a running cluster: cached KV blocks are dropped, in the pools and in the tiers below."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, tandem

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    options = ("--kv-cache-gib", "0.05", "--block-size", "16", "--kv-host-gib", "0.05", "--threads-per-worker", "1")
    with Cluster(*options) as running:
        yield running


def clear(cluster: Cluster, kind: str) -> subprocess.CompletedProcess[str]:
    command = tandem("cache", "clear", kind, "--port", str(cluster.port))
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def num_found(cluster: Cluster) -> int:
    """Sends a prompt of 200 tokens. Returns how many were cached."""
    usage = cluster.complete(prompt=[7] * 200, max_tokens=1)["usage"]
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def num_cached(cluster: Cluster) -> tuple[int, int]:
    """Returns the blocks in the prefill worker's pool and in its host memory."""
    load = cluster.worker("prefill-0").load
    return load.num_cached_blocks, load.tiers[0].num_blocks


def test_cleared_blocks_are_computed_again(cluster: Cluster) -> None:
    assert num_found(cluster) == 0
    Cluster.wait_for(lambda: num_cached(cluster)[0] >= 12)
    assert num_found(cluster) >= 176
    done = clear(cluster, "kv")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "decode-0 drops its cached KV blocks\nprefill-0 drops its cached KV blocks\n"
    Cluster.wait_for(lambda: num_cached(cluster) == (0, 0))
    assert num_found(cluster) == 0


def test_a_cache_that_does_not_exist_is_refused(cluster: Cluster) -> None:
    missing = clear(cluster, "media")
    assert missing.returncode == 2 and "has no media cache" in missing.stderr
