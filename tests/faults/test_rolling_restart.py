"""`tandem restart` and `tandem drain` under load: processes are replaced one by one and no request fails."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, tandem
from tests.support.steady_load import SteadyLoad

PROCESSES = ("decode-0", "decode-1", "prefill-0", "prefill-1", "proxy-0", "proxy-1")
NUM_PAIRS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    flags = ("--prefill", "2", "--decode", "2", "--proxies", "2", "--dtype", "float32", "--kv-cache-gib", "0.02")
    with Cluster(*flags, "--max-num-batched-tokens", "64", "--threads-per-worker", "1") as running:
        yield running


@pytest.fixture(scope="module")
def load(cluster: Cluster) -> SteadyLoad:
    return SteadyLoad(cluster)


def command(cluster: Cluster, *arguments: str) -> str:
    return subprocess.run(
        tandem(*arguments, "--port", str(cluster.port)), capture_output=True, text=True, check=True, timeout=500
    ).stdout


def epochs(cluster: Cluster) -> dict[str, str]:
    return {report.worker.worker_id: report.worker.epoch for report in cluster.status().workers}


@pytest.mark.timeout(700)
def test_rolling_restart_loses_no_request(cluster: Cluster, load: SteadyLoad) -> None:
    epochs_before, pids_before = epochs(cluster), set(cluster.pids())
    with load.running():
        load.serve(4)
        output = command(cluster, "restart", "--timeout-s", "300")
        load.serve(8)
    assert [line for line in output.splitlines() if "is back" in line] == [f"{name} is back" for name in PROCESSES]
    assert set(epochs(cluster)) == set(epochs_before)
    assert not set(epochs(cluster).values()) & set(epochs_before.values())
    assert not set(cluster.pids()) & pids_before
    cluster.wait_for(cluster.all_blocks_free)
    assert "Traceback" not in cluster.logs()


@pytest.mark.timeout(400)
def test_drained_workers_finish_their_requests(cluster: Cluster, load: SteadyLoad) -> None:
    with load.running():
        load.serve(4)
        output = command(cluster, "drain", "decode-1")
        assert output.splitlines() == ["decode-1 is draining", "decode-1 has left"]
        command(cluster, "drain", "prefill-0")
        load.serve(8)
    assert set(epochs(cluster)) == {"decode-0", "prefill-1"}
    cluster.wait_for(cluster.all_blocks_free)
    assert "Traceback" not in cluster.logs()
