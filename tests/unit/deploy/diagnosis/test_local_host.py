"""CPU times, NUMA nodes and clocks are read as the kernel and HTTP write them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from threading import Thread

import pytest
from prometheus_client import CollectorRegistry

from tandem.deploy.diagnosis.local_host import (
    HostReading,
    ProcessTimes,
    clock_offset,
    clock_offsets,
    host_figures,
    node_cpus,
    offset_of,
    read_host,
    worker_memory,
)
from tandem.protocol.messages.membership import WorkerInfo
from tandem.runtime.host import host_id
from tandem.telemetry.worker_metrics import MetricsEndpoint

MAPS = """\
7f00 default file=/memfd:pool dirty=900 N0=100 N1=200 kernelpagesize_kB=4
7f10 default anon=2 dirty=2 N1=2 kernelpagesize_kB=2048
7f20 default
"""


def folder_of(proc: Path, pid: int, **files: str) -> None:
    (proc / str(pid)).mkdir(parents=True)
    for name, text in files.items():
        (proc / str(pid) / name).write_text(text)


def test_times_are_read_from_proc(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  10 1 20 900 5 2 3 4 0 0\ncpu0 1\ncpu1 1\nintr 9\n")
    folder_of(tmp_path, 42, stat="42 (a (b) c) S 7 42 42 0 -1 4194304 1 0 0 0 30 12 0 0 20 0 9 0\n")
    folder_of(tmp_path, 43)  # it ends meanwhile
    assert read_host(tmp_path) == HostReading(2, 40, 4, {42: ProcessTimes("a (b) c", 7, 42)})


def test_this_host_can_be_read() -> None:
    before, began_at = read_host(), time.monotonic()
    spinner = Thread(target=lambda: [None for _ in iter(lambda: time.monotonic() < began_at + 0.5, False)])
    spinner.start()
    spinner.join()
    figures = host_figures(before, read_host(), time.monotonic() - began_at, frozenset(), {}, 1)
    own = next(each for each in figures.neighbours if each.pid == os.getpid())
    assert 0 < own.num_cpus <= figures.busy_cpus + 0.1 and figures.num_cpus == os.sysconf("SC_NPROCESSORS_ONLN")


def test_descendants_of_the_cluster_are_no_neighbours() -> None:
    before = HostReading(4, 0, 0, {1: ProcessTimes("init", 0, 0), 10: ProcessTimes("worker", 1, 100)})
    processes = {
        1: ProcessTimes("init", 0, 0),
        10: ProcessTimes("worker", 1, 300),
        11: ProcessTimes("grammar", 10, 50),  # has started meanwhile
        12: ProcessTimes("miner", 1, 400),
    }
    figures = host_figures(before, HostReading(4, 800, 50, processes), 2.0, frozenset({10}), {}, 1)
    assert (figures.own_cpus, figures.busy_cpus, figures.stolen_cpus) == (1.25, 4.0, 0.25)
    assert [(each.name, each.num_cpus) for each in figures.neighbours] == [("miner", 2.0), ("init", 0.0)]


def test_numa_nodes_are_read(tmp_path: Path) -> None:
    for node, listed in ((0, "0-3,8"), (1, "4-7")):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(listed + "\n")
    cpus = node_cpus(tmp_path)
    assert cpus == {0: {0, 1, 2, 3, 8}, 1: {4, 5, 6, 7}}
    folder_of(tmp_path, 42, status="Name:\tworker\nCpus_allowed_list:\t2-3\n", numa_maps=MAPS)
    memory = worker_memory(42, cpus, tmp_path)
    assert memory is not None and memory.nodes == {0} and memory.num_pages == {0: 100, 1: 200 + 2 * 512}
    assert worker_memory(43, cpus, tmp_path) is None


class AheadEndpoint(MetricsEndpoint):
    """A worker's /metrics on a host whose clock is 40 s ahead."""

    def __init__(self, ahead_s: float) -> None:
        super().__init__("127.0.0.1", 0, CollectorRegistry())
        handler = self.RequestHandlerClass
        date = handler.date_time_string  # type: ignore[attr-defined]
        handler.date_time_string = lambda own, at=None: date(own, (at or time.time()) + ahead_s)  # type: ignore[attr-defined]


@pytest.mark.parametrize("ahead_s", [40.0, -40.0, 0.0])
def test_a_clock_is_read_from_metrics(ahead_s: float) -> None:
    endpoint = AheadEndpoint(ahead_s)
    try:
        offset_s = clock_offset(f"127.0.0.1:{endpoint.server_port}")
    finally:
        endpoint.close()
    assert offset_s == pytest.approx(ahead_s, abs=1.5)


@pytest.mark.parametrize(
    ("sent_at", "received_at", "offset_s"),
    [(100.4, 100.6, 0.0), (99.5, 99.9, 0.1), (101.5, 101.6, -0.5), (100.9, 103.0, 0.0)],
)
def test_a_date_shows_an_offset_only_for_certain(sent_at: float, received_at: float, offset_s: float) -> None:
    assert offset_of(100.0, sent_at, received_at) == pytest.approx(offset_s)


def test_only_workers_elsewhere_that_can_be_reached_are_asked() -> None:
    def worker(host: str, address: str) -> WorkerInfo:
        return WorkerInfo("decode-0", "e", "decode", "", 1, metrics_address=address, host_id=host)

    workers = [worker(host_id(), "192.0.2.1:1"), worker("elsewhere", "127.0.0.1:1"), worker("elsewhere", "")]
    assert clock_offsets(workers) == {}
    assert clock_offset("127.0.0.1:1") is None
