"""Decode workers freeze for longer than a KV lease but less than the silence limit: only the leases expire.

Over `ipc` only: with the other connectors five seconds without progress fail the pair before the lease of ten expires.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.faults.test_kv_pairs import ask, failed_pairs
from tests.support.cluster import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    arguments = ["--max-num-batched-tokens", "16", "--kv-cache-gib", "0.02", "--kv-connector", "ipc"]
    with Cluster("--decode", "2", "--threads-per-worker", "1", "--worker-silence-s", "30", *arguments) as running:
        yield running


def test_expired_leases_leave_the_pair_usable(cluster: Cluster) -> None:
    epochs = {report.worker.epoch for report in cluster.status().workers}
    frozen = [cluster.worker(worker_id).worker.pid for worker_id in ("decode-0", "decode-1")]
    answers = ask(cluster, 12, 1590)
    cluster.wait_for(lambda: cluster.worker("prefill-0").load.num_transferred_bytes > 0)
    for pid in frozen:  # both, since either may be the target of the transfer in flight
        os.kill(pid, signal.SIGSTOP)
    try:
        cluster.wait_for(lambda: "KV leases expired" in cluster.logs(), 60)
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    codes = [answer.result(120) for answer in answers]
    assert set(codes) == {200}, "requests with expired leases are prefilled again"
    cluster.wait_for(cluster.all_blocks_free)
    assert {report.worker.epoch for report in cluster.status().workers} == epochs, "no worker was lost"
    assert failed_pairs(cluster) == [], "the pair stays ready"
    assert [answer.result(120) for answer in ask(cluster, 6, 300)] == [200] * 6
    assert "Traceback" not in cluster.logs()
