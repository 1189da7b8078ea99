"""`tandem cache`: what it shows of workers' pools and tiers, and whom it tells to drop their blocks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rich.console import Console

from tandem.deploy.commands.cache import cache_table, clear_caches, show_caches
from tandem.deploy.commands.status import status_tables
from tandem.deploy.operations.cluster_client import ClusterClient
from tandem.deploy.operations.serving_rates import RateSample
from tandem.protocol.messages.membership import (
    ClearWorkerCache,
    StatusDetail,
    StatusReport,
    TierFigures,
    WorkerInfo,
    WorkerLoad,
    WorkerOrdered,
    WorkerReport,
)
from tandem.runtime.errors import ConfigError

GIB = 1 << 30
HOST = TierFigures("host", 12000, GIB // 2, 2 * GIB, num_stored=20000, num_loaded=300, num_skipped=4, num_corrupt=5)
DISK = TierFigures("disk", 70000, 5 * GIB, 100 * GIB, error="cannot write [7]: No space left on device, since a while")
STORE = TierFigures("store", 6)
WORKERS = [
    WorkerReport(
        WorkerInfo("worker-1", "b", "any", "", 2, num_ranks=2),
        WorkerLoad(
            num_blocks=640,
            num_cached_blocks=118,
            num_prompt_tokens=150,
            num_cached_tokens=60,
            num_loaded_tokens=30,
            tiers=[HOST, DISK, STORE],
        ),
        [],
        0.1,
    ),
    WorkerReport(
        WorkerInfo("worker-0", "a", "any", "", 1),
        WorkerLoad(num_blocks=640, num_prompt_tokens=50, num_cached_tokens=40),
        [],
        0.1,
    ),
]


class FakeCluster(ClusterClient):
    """Two proxies. errors: their answers to the order for a worker; none by default."""

    def __init__(self, folder: Path, errors: dict[str, tuple[str, str]] | None = None) -> None:
        super().__init__(8000)
        self.folder = folder
        self._errors = errors or {}
        self.cleared: list[str] = []

    async def status(self, detail: StatusDetail = "pairs") -> list[StatusReport]:
        # The second proxy has not heard of worker-1 yet.
        return [StatusReport(f"proxy-{n}", "m", True, 0, WORKERS[n:]) for n in range(2)]

    async def ask_proxies(self, question: object, kind: object) -> list[WorkerOrdered]:  # type: ignore[override]
        assert isinstance(question, ClearWorkerCache) and kind is WorkerOrdered
        self.cleared.append(question.worker_id)
        return [WorkerOrdered(question.worker_id, each) for each in self._errors.get(question.worker_id, ("", ""))]


def test_each_worker_has_a_row_for_its_pool_and_one_for_each_tier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(show_caches(FakeCluster(tmp_path)))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown, "output to a pipe has no escape codes"
    table, _, notes = shown.partition("\n\n")
    lines = [line.rstrip() for line in table.splitlines()]
    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines[-5:]] == [
        ["worker-0", "pool", "0/640"],
        ["worker-1", "pool", "118/640"],
        ["worker-1", "host", "12000", "1.00", "4.00", "20000", "300", "4", "5"],  # of both ranks
        ["worker-1", "disk", "70000", "5.00", "100.00", "0", "0", "0", "0"],
        ["worker-1", "store", "6", "0.00", "0", "0", "0", "0"],
    ]
    assert notes.splitlines() == [
        "200 prompt tokens: 50% were cached, 15% were loaded from tiers",
        f"worker-1 does not use its tier disk at the moment: {DISK.error}",
    ]


def test_a_cluster_without_requests_or_workers_is_shown_too() -> None:
    console = Console(width=80, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(cache_table([]))
    assert "no prompt tokens yet" in captured.get()


def test_the_status_has_a_line_for_each_worker_with_tiers() -> None:
    console = Console(width=80, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(status_tables(RateSample(0.0, [StatusReport("p", "m", True, 0, WORKERS)]), None, 0))
    text = "worker-1 KV tiers: host 1.00/4.00 GiB, disk 5.00/100.00 GiB (failing), store 0.00 GiB"
    shown = " ".join(captured.get().split())
    assert text in shown and shown.count("KV tiers") == 1


def test_every_worker_is_told_although_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = "no worker worker-0 is registered"
    cluster = FakeCluster(tmp_path, {"worker-0": (gone, gone), "worker-1": ("", "no worker worker-1 is registered")})
    with pytest.raises(ConfigError, match=gone):
        asyncio.run(clear_caches(cluster, None))  # there is no media cache
    assert cluster.cleared == ["worker-0", "worker-1"]
    assert capsys.readouterr().out == "worker-1 drops its cached KV blocks\n"


def test_a_named_cache_must_exist(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    with pytest.raises(ConfigError, match="no media cache"):
        asyncio.run(clear_caches(cluster, "media"))
    (tmp_path / "proxies").touch()
    with pytest.raises(ConfigError, match=r"on Ray .* `tandem restart`"):
        asyncio.run(clear_caches(cluster, "media"))
    assert cluster.cleared == []
    with pytest.raises(ConfigError, match="no cluster runs on port 8000"):
        asyncio.run(clear_caches(FakeCluster(tmp_path / "none"), "kv"))
