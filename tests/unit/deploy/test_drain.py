"""Draining: a worker gets no new work and may finish its requests within the time limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.deploy.operations import changes
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
from tandem.runtime.errors import ConfigError, InternalError
from tests.support.clocked_loop import run_in_no_time


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


@dataclass
class Moment:
    """What a cluster shows at one time: processes with their numbers of starts, and the reports of its proxies."""

    starts: dict[str, int]
    reports: list[StatusReport]


def _report(proxy_id: str, workers: dict[str, str], num_pairs: int, *, unanswered: Sequence[str] = ()) -> StatusReport:
    """workers: epochs by name. num_pairs: ready ones. unanswered: workers that have not answered the proxy's Ping."""
    reports = [
        WorkerReport(
            WorkerInfo(name, epoch, "decode", "", 1),
            WorkerLoad(),
            [],
            0.0,
            0 if number else num_pairs,
            unanswered_s=0.5 if name in unanswered else None,
        )
        for number, (name, epoch) in enumerate(workers.items())
    ]
    return StatusReport(proxy_id, "m", True, 0, reports)


class RestartedCluster:
    """Plays the moments that follow the order to restart, one with each poll; the last one stays.

    is_refused: the launcher finds that the process has ended meanwhile, and does not restart it.
    """

    def __init__(self, before: Moment, after: Sequence[Moment], *, is_refused: bool = False) -> None:
        self.now = before
        self._after = list(after)
        self._is_refused = is_refused
        self.asked: list[str] = []

    async def processes(self, question: object) -> dict[str, LaunchedProcess]:
        starts = dict(self.now.starts)
        if isinstance(question, RestartProcess):
            self.asked.append(question.name)
            starts[question.name] += self._is_refused
        return {name: LaunchedProcess(name, 10 * number, number) for name, number in starts.items()}

    async def status(self, detail: str) -> list[StatusReport]:
        now = self.now
        if self.asked and self._after:
            self.now = self._after.pop(0)
            now = self.now
        return now.reports

    @property
    def num_left(self) -> int:
        """Moments that the command has not waited for."""
        return len(self._after)


WORKERS = {"prefill-0": "p1", "decode-0": "d1"}
RESTARTED = WORKERS | {"decode-0": "d2"}


def _moment(starts: int, *reports: StatusReport) -> Moment:
    return Moment({"decode-0": starts, "prefill-0": 1, "proxy-0": 1, "proxy-1": 1, "media-cache": 1}, list(reports))


def _both(workers: dict[str, str], num_pairs: int, **fields: Any) -> list[StatusReport]:
    return [_report(f"proxy-{i}-a", workers, num_pairs, **fields) for i in range(2)]


BACK = _moment(2, *_both(RESTARTED, 1))
WAITS = {
    "its process has not been started again": _moment(1, *_both(RESTARTED, 1)),
    "no proxy reports": _moment(2),
    "a proxy does not report": _moment(2, _report("proxy-0-a", RESTARTED, 1)),
    "one proxy knows the old process": _moment(2, _report("proxy-0-a", RESTARTED, 1), _report("proxy-1-a", WORKERS, 1)),
    "no proxy knows the worker": _moment(2, *_both({"prefill-0": "p1"}, 1)),
    "one proxy does not know the worker": _moment(
        2, _report("proxy-0-a", RESTARTED, 1), _report("proxy-1-a", {"prefill-0": "p1"}, 1)
    ),
    "its pair is not ready": _moment(2, *_both(RESTARTED, 0)),
    "its pair is not ready for one proxy": _moment(
        2, _report("proxy-0-a", RESTARTED, 1), _report("proxy-1-a", RESTARTED, 0)
    ),
    "it has not answered one proxy": _moment(
        2, _report("proxy-0-a", RESTARTED, 1), _report("proxy-1-a", RESTARTED, 1, unanswered=["decode-0"])
    ),
}


def _restart(cluster: RestartedCluster, *names: str, timeout_s: float = 10.0) -> list[str]:
    lines: list[str] = []
    run_in_no_time(changes.restart(cluster, list(names), timeout_s, lines.append))  # type: ignore[arg-type]
    return lines


@pytest.mark.parametrize("reason", WAITS)
def test_a_worker_is_not_back_while(reason: str) -> None:
    cluster = RestartedCluster(_moment(1, *_both(WORKERS, 1)), [WAITS[reason], BACK])
    assert _restart(cluster, "decode-0") == ["decode-0 (process 10) is draining", "decode-0 is back"]
    assert cluster.num_left == 0, "the command waits until it is back"
    stuck = RestartedCluster(_moment(1, *_both(WORKERS, 1)), [WAITS[reason]])
    with pytest.raises(InternalError, match="decode-0 has not come back within 10 s"):
        _restart(stuck, "decode-0")


def test_a_worker_that_no_proxy_knew_is_not_back_before_it_is_known() -> None:
    """It may have been loading, or left for another command, when it was restarted."""
    unknown = {"prefill-0": "p1"}
    cluster = RestartedCluster(_moment(1, *_both(unknown, 0)), [_moment(2, *_both(unknown, 0)), BACK])
    assert _restart(cluster, "decode-0")[-1] == "decode-0 is back" and cluster.num_left == 0
    stuck = RestartedCluster(_moment(1, *_both(unknown, 0)), [_moment(2, *_both(unknown, 0))])
    with pytest.raises(InternalError, match="decode-0 has not come back within 10 s"):
        _restart(stuck, "decode-0")


def test_a_worker_that_does_not_answer_holds_up_no_other() -> None:
    reports = _both(RESTARTED, 1, unanswered=["prefill-0"])
    assert _restart(RestartedCluster(_moment(1, *_both(WORKERS, 1)), [_moment(2, *reports)]), "decode-0")


def test_a_proxy_is_back_under_a_new_id() -> None:
    def moment(starts: int, *proxy_ids: str) -> Moment:
        reports = [_report(proxy_id, WORKERS, 1) for proxy_id in proxy_ids]
        return Moment({"proxy-0": starts, "proxy-1": 1}, reports)

    old = moment(1, "proxy-0-a", "proxy-1-a")
    waits = [moment(2, "proxy-0-a", "proxy-1-a"), moment(2, "proxy-1-a")]
    cluster = RestartedCluster(old, [*waits, moment(2, "proxy-0-b", "proxy-1-a")])
    assert _restart(cluster, "proxy-0")[-1] == "proxy-0 is back" and cluster.num_left == 0


def test_a_process_without_reports_is_back_when_it_has_been_started() -> None:
    before, after = _moment(1, *_both(WORKERS, 1)), _moment(1, *_both(WORKERS, 1))
    after.starts["media-cache"] = 2
    cluster = RestartedCluster(before, [before, after])
    assert _restart(cluster, "media-cache")[-1] == "media-cache is back" and cluster.num_left == 0


def test_a_process_that_has_ended_meanwhile_is_not_waited_for() -> None:
    cluster = RestartedCluster(_moment(1, *_both(WORKERS, 1)), [], is_refused=True)
    assert _restart(cluster, "decode-0") == ["decode-0 (process 10) has ended meanwhile"]


def test_workers_are_restarted_before_proxies_and_one_at_a_time() -> None:
    names = ["proxy-0", "prefill-0", "decode-1", "decode-0", "proxy-1"]
    starts = dict.fromkeys(names, 1)
    epochs = {"decode-0": "x", "decode-1": "x", "prefill-0": "x"}
    ids = {"proxy-0": "proxy-0-x", "proxy-1": "proxy-1-x"}

    def moment() -> Moment:
        return Moment(dict(starts), [_report(proxy_id, dict(epochs), 3) for proxy_id in ids.values()])

    before, after = moment(), []
    order = ["decode-0", "decode-1", "prefill-0", "proxy-0", "proxy-1"]
    for name in order:
        after.append(moment())  # the command waits once
        starts[name] += 1
        if name in ids:
            ids[name] = f"{name}-y"
        else:
            epochs[name] = "y"
        after += [moment(), moment()]  # the second one is seen before the next restart
    cluster = RestartedCluster(before, after)
    assert _restart(cluster)[1::2] == [f"{name} is back" for name in order] and cluster.asked == order


def test_an_unknown_process_is_named() -> None:
    cluster = RestartedCluster(_moment(1), [])
    with pytest.raises(ConfigError, match="no process is called decode-7; the cluster runs decode-0, prefill-0"):
        _restart(cluster, "decode-0", "decode-7")
    assert not cluster.asked


class LeavingWorker:
    """A cluster whose launcher answers with `listed` in turn, and whose proxies list the workers of `known` in turn:
    their epochs, and whether they drain. By default the worker has left them."""

    def __init__(self, listed: list[list[LaunchedProcess]], known: Sequence[Sequence[tuple[str, bool]]] = ()) -> None:
        self.listed = listed
        self.known = list(known)

    async def processes(self, question: object) -> dict[str, LaunchedProcess]:
        return {each.name: each for each in self.listed.pop(0)}

    async def status(self, detail: str) -> list[StatusReport]:
        if not self.known:
            return []
        reports = []
        for epoch, is_draining in self.known.pop(0):
            report = _report("proxy-0-a", {"decode-0": epoch}, 0)
            [worker] = report.workers
            draining_worker = msgspec.structs.replace(worker, draining=is_draining)
            reports.append(msgspec.structs.replace(report, workers=[draining_worker]))
        return reports

    async def ask_proxies(self, message: object, kind: object) -> list[WorkerOrdered]:
        return [WorkerOrdered("decode-0")]


@pytest.mark.parametrize("is_launched_here", [True, False])
def test_the_command_waits_for_the_process_too(capsys: pytest.CaptureFixture[str], is_launched_here: bool) -> None:
    """The launcher counts the worker until its process has ended, so a `tandem scale` before that would be wrong."""
    process = LaunchedProcess("decode-0", pid=7, num_starts=1)
    cluster = LeavingWorker([[process], [process], [process], []] if is_launched_here else [[]])
    run_in_no_time(changes.drain(cluster, "decode-0", 10.0))  # type: ignore[arg-type]
    assert capsys.readouterr().out == "decode-0 is draining\ndecode-0 has left\n"
    assert not cluster.listed


def test_another_process_of_the_same_name_is_not_waited_for() -> None:
    """The planner started a new worker of that name before the command had seen that the old one was gone."""
    old, new = LaunchedProcess("decode-0", pid=7, num_starts=1), LaunchedProcess("decode-0", pid=8, num_starts=2)
    known = [
        [("d1", True)], [("d1", True), ("d1", False)], [("d1", False)],  # a proxy that started has not heard of it yet
        [("d1", True), ("d2", False)], [("d2", False)],
    ]  # fmt: skip
    cluster = LeavingWorker([[old], [old], [old], [new], [new], [new]], known)
    run_in_no_time(changes.drain(cluster, "decode-0", 10.0))  # type: ignore[arg-type]
    assert not cluster.known and not cluster.listed
