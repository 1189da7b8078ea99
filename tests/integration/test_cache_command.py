"""`tandem cache` on a running cluster: prefetching a prompt, showing where it is cached, and dropping it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import MODEL, Cluster

pytestmark = pytest.mark.timeout(600)
KEY = "secret-of-prefetch"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    options = ("--kv-cache-gib", "0.05", "--block-size", "16", "--kv-host-gib", "0.05", "--threads-per-worker", "1")
    with Cluster(*options, "--api-key", KEY) as running:
        yield running


def cache(cluster: Cluster, *arguments: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    return cluster.run("cache", *arguments, TANDEM_API_KEY=key)


def prefetch(cluster: Cluster, folder: Path, token: int) -> int:
    """Prefetches a prompt of 200 tokens. Returns how many were cached."""
    file = folder / "request.json"
    file.write_text(json.dumps({"model": MODEL, "prompt": [token] * 200, "max_tokens": 50, "stream": True}))
    done = cache(cluster, "prefetch", str(file))
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"200 prompt tokens, (\d+) of them were cached\n", done.stdout)
    assert found, done.stdout
    return int(found[1])


def rows(cluster: Cluster) -> dict[tuple[str, str], list[str]]:
    """Rows of `tandem cache show` by worker and tier."""
    done = cache(cluster, "show")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.partition("\n\n")[0].splitlines()]
    return {(line[0], line[1]): line[2:] for line in lines if line[0].startswith(("prefill", "decode"))}


def num_cached(cluster: Cluster) -> int:
    return int(rows(cluster)["prefill-0", "pool"][0].partition("/")[0])


def test_a_prefetched_prompt_is_cached(cluster: Cluster, tmp_path: Path) -> None:
    assert prefetch(cluster, tmp_path, 5) == 0
    Cluster.wait_for(lambda: num_cached(cluster) >= 12)
    assert prefetch(cluster, tmp_path, 5) >= 176
    assert {worker for worker, tier in rows(cluster) if tier == "pool"} == {"prefill-0", "decode-0"}
    refused = cache(cluster, "prefetch", str(tmp_path / "request.json"), key="wrong")
    assert refused.returncode == 2
    assert refused.stderr == "tandem: the cluster needs an API key; set TANDEM_API_KEY, or give --api-key\n"


def test_cleared_blocks_are_computed_again(cluster: Cluster, tmp_path: Path) -> None:
    prefetch(cluster, tmp_path, 7)
    Cluster.wait_for(lambda: num_cached(cluster) >= 12)
    done = cache(cluster, "clear", "kv")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "decode-0 drops its cached KV blocks\nprefill-0 drops its cached KV blocks\n"
    Cluster.wait_for(lambda: num_cached(cluster) == 0)
    Cluster.wait_for(lambda: {row[0] for (_, tier), row in rows(cluster).items() if tier == "host"} == {"0"})
    assert prefetch(cluster, tmp_path, 7) == 0
    missing = cache(cluster, "clear", "media")
    assert missing.returncode == 2 and "has no media cache" in missing.stderr
