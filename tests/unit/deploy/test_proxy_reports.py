"""What the launcher keeps of the proxies' reports, and whom it asks for their workers."""

from __future__ import annotations

import msgspec

from tandem.deploy.launch.proxy_reports import MAX_AGE_S, ProxyReports
from tandem.deploy.launch.start import is_complete
from tandem.protocol.messages.membership import (
    LatencyBuckets,
    ServingFigures,
    StatusReport,
    WorkerInfo,
    WorkerLoad,
    WorkerReport,
)

NONE = LatencyBuckets([], [0])


def worker(name: str, pid: int, num_running: int, silence_s: float = 0.0) -> WorkerReport:
    info = WorkerInfo(name, f"{name}-{pid}", "prefill", "", pid)
    return WorkerReport(info, WorkerLoad(num_running=num_running), [], silence_s)


def report(*workers: WorkerReport, num_refused: int = 0) -> StatusReport:
    figures = ServingFigures(0, 0, 0, 0, NONE, NONE, NONE, {}, num_refused)
    return StatusReport("p", "m", True, 0, list(workers), figures)


def running(reports: ProxyReports) -> dict[str, int]:
    return {info.worker_id: load.num_running for info, load in reports.loads}


def test_one_proxy_at_a_time_is_asked_for_its_workers() -> None:
    reports, proxies = ProxyReports(), ["a", "b", "c"]
    asked = [reports.to_ask(proxies) for _ in range(4)]
    assert [[name for name in proxies if each[name] == "workers"] for each in asked] == [["a"], ["b"], ["c"], ["a"]]
    assert all(sorted(each.values()) == ["proxy", "proxy", "workers"] for each in asked)
    assert reports.to_ask([]) == {}


def test_the_load_that_a_worker_reported_last_counts() -> None:
    reports, pids = ProxyReports(), {"prefill-0": 1, "prefill-1": 2}
    reports.on_report(10.0, "a", report(worker("prefill-0", 1, 5, 0.1), worker("prefill-1", 2, 7)), pids)
    reports.on_report(10.1, "b", report(worker("prefill-0", 1, 1, 2.0)), pids)
    assert running(reports) == {"prefill-0": 5, "prefill-1": 7}, "b heard from the first long ago, and lost the other"
    reports.on_report(10.2, "b", report(worker("prefill-0", 1, 6, 0.1)), pids)
    assert running(reports) == {"prefill-0": 6, "prefill-1": 7}


def test_loads_of_other_processes_and_of_silent_workers_do_not_count() -> None:
    reports = ProxyReports()
    workers = worker("prefill-0", 1, 5), worker("prefill-0-far", 8, 1), worker("prefill-1", 2, 7)
    reports.on_report(0.0, "a", report(*workers), {"prefill-0": 1, "prefill-1": 2})
    assert running(reports) == {"prefill-0": 5, "prefill-1": 7} and not reports.is_known("prefill-0-far")
    reports.on_report(1.0, "b", report(), {"prefill-0": 3, "prefill-1": 2})
    assert running(reports) == {"prefill-1": 7} and not reports.is_known("prefill-0"), "it was restarted"
    reports.on_report(MAX_AGE_S + 0.1, "b", report(), {"prefill-0": 3, "prefill-1": 2})
    assert running(reports) == {}


def test_a_proxy_is_complete_when_it_knows_our_processes_and_their_pairs() -> None:
    ours = {("prefill-0", 1), ("prefill-1", 2)}
    known = report(worker("prefill-0", 1, 0), worker("prefill-1", 2, 0), worker("prefill-0-far", 8, 0))
    assert is_complete(known, ours, 0) and not is_complete(known, ours, 1) and not is_complete(None, ours, 0)
    ready = msgspec.structs.replace(known, workers=[msgspec.structs.replace(known.workers[0], num_ready_pairs=1)])
    assert not is_complete(ready, ours, 1) and is_complete(ready, {("prefill-0", 1)}, 1)
    assert not is_complete(known, {("prefill-0", 3)}, 0), "another process of that name"


def test_a_proxy_is_not_complete_while_one_of_our_workers_does_not_answer_it() -> None:
    here, far = worker("prefill-0", 1, 0), worker("prefill-0-far", 8, 0)
    late = msgspec.structs.replace(here, unanswered_s=0.0)
    assert not is_complete(report(late), {("prefill-0", 1)}, 0)
    assert is_complete(report(here, msgspec.structs.replace(far, unanswered_s=9.0)), {("prefill-0", 1)}, 0)


def test_refusals_are_summed_over_the_last_report_of_each_proxy() -> None:
    reports = ProxyReports()
    assert reports.num_refused is None and reports.of("a") is None
    for proxy, num_refused in (("a", 3), ("b", 4), ("a", 5)):
        reports.on_report(0.0, proxy, report(num_refused=num_refused), {})
    assert reports.num_refused == 9
