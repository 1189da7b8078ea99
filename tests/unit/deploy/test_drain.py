"""Draining: a worker gets no new work and may finish its requests within the time limit."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.deploy.launch import draining
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    PairChanges,
    PairStatus,
    RegisterWorker,
    Role,
    StatusReport,
    WorkerInfo,
    WorkerLoad,
    WorkerOrdered,
    WorkerReport,
    WorkerStatus,
)
from tandem.protocol.messages.operations import LaunchedProcess, RestartProcess
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.runtime.drain import SETTLE_S, Drain


@given(st.lists(st.tuples(st.floats(0, 2), st.booleans()), max_size=40), st.floats(0.1, 10))
def test_a_drain_ends_when_idle_and_settled_or_at_its_limit(steps: list[tuple[float, bool]], limit_s: float) -> None:
    drain, now = Drain(limit_s), 100.0
    assert not drain.has_begun and not drain.is_over(now, is_idle=True)
    drain.begin(now)
    drain.begin(now + 5)  # a second time changes nothing
    idle_since = math.inf
    for waited_s, is_idle in steps:
        now += waited_s
        idle_since = min(idle_since, now) if is_idle else math.inf
        expected = now - 100.0 >= limit_s or now - idle_since >= SETTLE_S
        assert drain.is_over(now, is_idle) == expected
    assert drain.is_over(100.0 + limit_s + 0.001, is_idle=False)


def test_a_restart_drain_may_become_permanent() -> None:
    drain = Drain(30)
    drain.begin(0.0)
    assert not drain.for_good
    drain.begin(1.0, for_good=True)
    drain.begin(2.0)
    assert drain.for_good


def _table() -> tuple[WorkerTable, list[WorkerInfo]]:
    table = WorkerTable(2.5)
    names: list[tuple[str, Role]] = [("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")]
    workers = [WorkerInfo(name, f"{name}/1", role, f"ipc://{name}", pid) for pid, (name, role) in enumerate(names)]
    for worker in workers:
        table.on_register(0.0, RegisterWorker(PROTOCOL_VERSION, worker, 100, 500, "m", 64))
    pairs = [PairStatus(worker.worker_id, worker.epoch, "ready") for worker in workers[1:]]
    table.on_status(0.0, WorkerStatus("prefill-0", "prefill-0/1", "prefill", WorkerLoad(), PairChanges(0, pairs)))
    return table, workers


def test_draining_workers_get_no_requests_but_stay_registered() -> None:
    table, (prefill, first, second) = _table()
    changes = table.num_changes
    table.on_status(0.1, WorkerStatus(first.worker_id, first.epoch, first.role, WorkerLoad(), draining=True))
    assert table.num_changes > changes
    [record] = table.paired_prefill_workers
    assert [peer.worker for peer in record.decode_peers.values()] == [second]
    assert {report.worker.worker_id: report.draining for report in table.report(0.1)} == {
        "prefill-0": False, "decode-0": True, "decode-1": False,
    }  # fmt: skip
    table.on_status(0.2, WorkerStatus(second.worker_id, second.epoch, second.role, WorkerLoad(), draining=True))
    assert table.why_not_ready() == "no decode worker is ready"
    assert [gone.reason for gone in table.on_left(first.epoch).lost] == ["it has left"]
    assert not table.on_left(first.epoch)
    assert table.workers() == [prefill, second]


class RestartedCluster:
    """A cluster of one prefill and three decode workers. Each that is restarted registers before its pair is ready."""

    def __init__(self) -> None:
        self.names = ["prefill-0", "decode-0", "decode-1", "decode-2"]
        self.starts = dict.fromkeys(self.names, 1)
        self.unpaired = 0  # answers until the pairs of the restarted worker are ready
        self.fewest: list[int] = []  # ready pairs when a restart was asked for

    async def processes(self, question: object) -> dict[str, LaunchedProcess]:
        running = {name: LaunchedProcess(name, 10 * number, number) for name, number in self.starts.items()}
        if isinstance(question, RestartProcess):
            self.fewest.append(self.num_ready)
            self.starts[question.name] += 1
            self.unpaired = 4
        return running

    @property
    def num_ready(self) -> int:
        return 3 if not self.unpaired else 2

    async def status(self, detail: str) -> list[StatusReport]:
        self.unpaired = max(0, self.unpaired - 1)
        infos = [WorkerInfo(name, f"{name}/{self.starts[name]}", "decode", "", 1) for name in self.names]
        num_pairs = [self.num_ready, 0, 0, 0]
        workers = [WorkerReport(info, WorkerLoad(), [], 0.0, num) for info, num in zip(infos, num_pairs, strict=True)]
        return [StatusReport("proxy-0-1", "m", True, 0, workers)]


def test_a_rolling_restart_goes_on_when_all_pairs_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "_POLL_S", 0.0)
    cluster = RestartedCluster()
    asyncio.run(draining.restart(cluster, [], 10.0, lambda line: None))  # type: ignore[arg-type]
    assert cluster.starts == dict.fromkeys(cluster.names, 2) and cluster.fewest == [3] * 4


class LeavingWorker:
    """A cluster whose worker has left the proxies, and whose launcher answers with `listed` in turn."""

    def __init__(self, listed: list[list[LaunchedProcess]]) -> None:
        self.listed = listed

    async def processes(self, question: object) -> dict[str, LaunchedProcess]:
        return {each.name: each for each in self.listed.pop(0)}

    async def status(self, detail: str) -> list[StatusReport]:
        return []

    async def ask_proxies(self, message: object, kind: object) -> list[WorkerOrdered]:
        return [WorkerOrdered("decode-0")]


@pytest.mark.parametrize("is_launched_here", [True, False])
def test_the_command_waits_for_the_process_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_launched_here: bool
) -> None:
    """The launcher counts the worker until its process has ended, so a `tandem scale` before that would be wrong."""
    process = LaunchedProcess("decode-0", pid=7, num_starts=1)
    cluster = LeavingWorker([[process], [process], [process], []] if is_launched_here else [[]])
    monkeypatch.setattr(draining, "_POLL_S", 0.0)
    asyncio.run(draining.drain(cluster, "decode-0", 10.0))  # type: ignore[arg-type]
    assert capsys.readouterr().out == "decode-0 is draining\ndecode-0 has left\n"
    assert not cluster.listed
