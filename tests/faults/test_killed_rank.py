"""One rank of a tensor-parallel worker dies: the worker exits with a clear error and restarts; others keep running."""

from __future__ import annotations

import os
import signal

import pytest

from tests.faults.streams import Stream
from tests.support.cluster import MODEL, Cluster, children_of, is_alive
from tests.support.waiting import comes_true


def _pids(cluster: Cluster) -> dict[str, int]:
    return {report.worker.worker_id: report.worker.pid for report in cluster.status().workers}


@pytest.mark.timeout(360)
def test_worker_restarts_when_a_rank_dies() -> None:
    with Cluster(
        "--tensor-parallel-size", "2", "--dtype", "float32", "--kv-cache-gib", "0.1", "--worker-wait-s", "120"
    ) as cluster:
        expected = cluster.token_ids([7] * 200, 6)
        before = _pids(cluster)
        stream = Stream(cluster, {"model": MODEL, "prompt": [9] * 8, "max_tokens": 1500, "ignore_eos": True})
        assert comes_true(lambda: bool(stream.arrivals), 20)
        (follower,) = children_of(before["decode-0"])
        os.kill(follower, signal.SIGKILL)
        cluster.wait_for(lambda: not is_alive(before["decode-0"]))
        assert stream.wait(150) and stream.outcome == "length", "the stream continues on the restarted worker"
        assert f"rank 1 (process {follower}) exited with -9; the worker ends with it" in cluster.logs()

        cluster.wait_for(cluster.is_healthy, 90)
        assert cluster.token_ids([7] * 200, 6) == expected
        (follower,) = children_of(before["prefill-0"])
        os.kill(before["prefill-0"], signal.SIGKILL)
        cluster.wait_for(lambda: not is_alive(follower))

        cluster.wait_for(cluster.is_healthy, 90)
        assert cluster.token_ids([7] * 200, 6) == expected
        after = _pids(cluster)
        assert after.keys() == before.keys() and not set(after.values()) & set(before.values())
        cluster.wait_for(cluster.all_blocks_free)
