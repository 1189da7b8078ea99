"""`tandem restart` and `tandem drain` under load: processes are replaced one by one and no request fails."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.deploy.processes.runtime_dir import log_dir
from tandem.worker import worker_config as module_of_workers
from tests.support.cluster import Cluster
from tests.support.steady_load import SteadyLoad

PROCESSES = ("decode-0", "decode-1", "prefill-0", "prefill-1", "proxy-0", "proxy-1")
NUM_PAIRS = 4


WORKERS = [name for name in PROCESSES if not name.startswith("proxy-")]
MARK = "this is the new code"


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package `tandem.worker`, which the cluster imports in place of the installed one."""
    folder = tmp_path_factory.mktemp("code")
    package = folder / "tandem/worker"
    shutil.copytree(Path(module_of_workers.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def cluster(code: Path) -> Iterator[Cluster]:
    size = ("--prefill", "2", "--decode", "2", "--proxies", "2", "--dtype", "float32", "--kv-cache-gib", "0.02")
    flags = (*size, "--max-num-batched-tokens", "64", "--threads-per-worker", "1")
    with Cluster(*flags, env={"PYTHONPATH": str(code)}) as running:
        yield running


@pytest.fixture(scope="module")
def load(cluster: Cluster) -> SteadyLoad:
    return SteadyLoad(cluster)


def command(cluster: Cluster, *arguments: str) -> str:
    done = cluster.run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def epochs(cluster: Cluster) -> dict[str, str]:
    return {report.worker.worker_id: report.worker.epoch for report in cluster.status().workers}


def upgrade(code: Path) -> None:
    """Changes a module on disk. A worker that has the new code says so in its log."""
    file = code / "tandem/worker/__main__.py"
    beginning = "def main() -> None:\n"
    old = file.read_text()
    assert beginning in old
    file.write_text(old.replace(beginning, f'{beginning}    print("{MARK}", flush=True)\n'))


def with_new_code(cluster: Cluster) -> list[str]:
    return [name for name in WORKERS if MARK in (log_dir(cluster.port) / f"{name}.log").read_text()]


@pytest.mark.timeout(700)
def test_rolling_restart_to_new_code_loses_no_request(cluster: Cluster, load: SteadyLoad, code: Path) -> None:
    upgrade(code)
    crashed = cluster.worker("decode-1").worker
    os.kill(crashed.pid, signal.SIGKILL)
    cluster.wait_for(lambda: epochs(cluster).get("decode-1", crashed.epoch) != crashed.epoch)
    cluster.wait_for(lambda: len(cluster.ready_pairs()) == NUM_PAIRS)
    assert not with_new_code(cluster), "a worker that has crashed runs the code of the others"

    epochs_before, pids_before = epochs(cluster), set(cluster.pids())
    with load.running():
        load.serve(4)
        output = command(cluster, "restart", "--timeout-s", "300")
        load.serve(8)
    assert [line for line in output.splitlines() if "is back" in line] == [f"{name} is back" for name in PROCESSES]
    assert set(epochs(cluster)) == set(epochs_before)
    assert not set(epochs(cluster).values()) & set(epochs_before.values())
    assert not set(cluster.pids()) & pids_before
    assert with_new_code(cluster) == WORKERS
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
