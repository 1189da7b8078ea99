"""What the proxies report to the launcher, and which of them it asks for their workers. Pure.

A report with workers grows with the cluster. While a cluster starts, a few proxies at a time are asked for one, until
each knows all workers. From then on one proxy at a time is asked, in turn, and the others for their own figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from tandem.protocol.messages.membership import (
    StatusDetail,
    StatusReport,
    WorkerInfo,
    WorkerLoad,
    WorkerReport,
)

MAX_ASKED = 4
"""Proxies that are asked at once while the cluster starts."""
MAX_AGE_S = 5.0
"""Age at which a load no longer counts: the proxies have lost the worker."""


class ProxyReports:
    def __init__(self) -> None:
        self._last: dict[str, StatusReport] = {}  # by proxy
        self._heard: dict[str, tuple[float, WorkerReport]] = {}  # by worker, with the time of its own report
        self._turns = itertools.count()

    def on_report(self, now: float, proxy: str, report: StatusReport, pids: Mapping[str, int]) -> None:
        """pids: processes of the launcher's workers, by name. Loads of other processes do not count."""
        self._last[proxy] = report
        reported = [(each.worker.worker_id, now - each.silence_s, each) for each in report.workers]
        known = [(name, at, each) for name, (at, each) in self._heard.items()]
        self._heard = {
            name: (at, each)
            for name, at, each in sorted(known + reported, key=lambda entry: entry[1])
            if pids.get(name) == each.worker.pid and at > now - MAX_AGE_S
        }

    def to_ask(self, proxies: Collection[str]) -> dict[str, StatusDetail]:
        """Returns what to ask each proxy for."""
        turn = next(self._turns) % max(1, len(proxies))
        return {name: "workers" if number == turn else "proxy" for number, name in enumerate(proxies)}

    def of(self, proxy: str) -> StatusReport | None:
        return self._last.get(proxy)

    def is_known(self, worker_id: str) -> bool:
        """Whether this process of the worker has registered with a proxy."""
        return worker_id in self._heard

    @property
    def loads(self) -> list[tuple[WorkerInfo, WorkerLoad]]:
        """The load of each worker, as the proxy that heard from it last reports it."""
        return [(each.worker, each.load) for _, each in self._heard.values()]

    @property
    def num_refused(self) -> int | None:
        """Requests refused by all proxies since their start; None before the first report."""
        counts = [report.figures.num_refused for report in self._last.values() if report.figures is not None]
        return sum(counts) if counts else None
