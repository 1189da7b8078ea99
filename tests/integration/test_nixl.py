"""A cluster whose KV travels through NIXL, over UCX: the answers are those of one worker."""

from __future__ import annotations

import pytest

from tests.support.cluster import Cluster
from tests.support.nixl import nixl_environment

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]


def test_tokens_are_those_of_one_worker() -> None:
    flags = ("--dtype", "float32")
    answers: list[list[list[int]]] = []
    for layout in (("--workers", "1"), ("--prefill", "1", "--decode", "2", "--kv-connector", "nixl")):
        with Cluster(*flags, *layout, env={"TANDEM_KV_CHECKSUMS": "1", **nixl_environment()}) as cluster:
            answers.append([cluster.token_ids(list(range(20, 20 + length)), 12) for length in (3, 70, 400)])
            status = cluster.status()
            connectors = {pair.connector for worker in status.workers for pair in worker.pairs}
            assert connectors == ({"nixl"} if len(answers) == 2 else set())
            assert sum(report.load.num_corrupt_blocks for report in status.workers) == 0
            cluster.wait_for(cluster.all_blocks_free)
    assert answers[0] == answers[1]
