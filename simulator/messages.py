"""Rules about messages: a cluster at rest has nothing to tell but that it is alive, and nothing is said twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tandem.deploy.launch.hang_detector import INTERVAL_S
from tandem.protocol.messages.membership import ClusterView, GetStatus, RegisterWorker, StatusReport, WorkerStatus
from tandem.protocol.messages.operations import ClusterScaled, ScaleCluster
from tandem.simulator.cluster import SimulatedCluster
from tandem.worker.presence import HEARTBEAT_INTERVAL_S

REST_S = 0.6
"""Time for which messages are counted: at least two heartbeats of each worker."""
_INTERVALS_S: dict[type, float] = {
    WorkerStatus: HEARTBEAT_INTERVAL_S,
    ClusterView: HEARTBEAT_INTERVAL_S,
    GetStatus: INTERVAL_S,
    StatusReport: INTERVAL_S,
    ScaleCluster: INTERVAL_S,  # an operator insists on the numbers
    ClusterScaled: INTERVAL_S,
}
"""Least time between two messages of a kind from one process to another, of all kinds that are sent at rest."""
MAX_REGISTRATIONS = 2
"""Of one worker, with a proxy that knows it all the time over a connection that does not break."""


class Messages:
    """Sees each message that arrives. report(rule, details): called when a rule is broken."""

    def __init__(self, cluster: SimulatedCluster, report: Callable[[str, str], None]) -> None:
        self._cluster = cluster
        self._report = report
        self._registrations: Counter[tuple[str, str]] = Counter()  # by epoch and proxy, without those that are needed
        self._counts: Counter[tuple[str, str, type]] | None = None  # at rest
        self._news: list[str] = []

    def begin_rest(self) -> None:
        """Counts messages from now on, until `end_rest`."""
        self._counts, self._news = Counter(), []

    def end_rest(self) -> str | None:
        """Returns which messages were not those of a cluster at rest, or None. Call it `REST_S` after the begin."""
        counts, self._counts = self._counts or Counter(), None
        for (sender, receiver, kind), count in counts.items():
            limit = 2 + int(REST_S / _INTERVALS_S[kind]) if kind in _INTERVALS_S else 0
            if count > limit:
                return f"{sender} sends {receiver} {count} {kind.__name__} in {REST_S} s"
        return self._news[0] if self._news else None

    def on_message(self, sender: str, receiver: str, message: Any) -> None:
        if isinstance(message, RegisterWorker):
            self._on_register(receiver, message.worker.epoch, sender)
        elif isinstance(message, ClusterView):
            self._check_view(receiver)
        if self._counts is not None:
            self._counts[sender, receiver, type(message)] += 1
            if _has_news(message):
                self._news.append(f"{sender} tells {receiver} what it knows: {type(message).__name__}")

    def _check_view(self, name: str) -> None:
        """Before the next view arrives, a worker knows those that any proxy knows, and nobody else."""
        worker = self._cluster.workers.get(name)
        links = worker.presence and worker.presence._registration if worker is not None else None
        if not links or any(link.is_settling or link.proxy_id is None for link in links._links):
            return
        known = {epoch for link in links._links for epoch in link.workers}
        if links._view.keys() != known:
            details = f"{name}: {sorted(links._view)} instead of {sorted(known)}"
            self._report("a worker knows of others than its proxies", details)

    def on_lost(self, epoch: str) -> None:
        """A proxy has lost a worker, which may register again with any."""
        for key in [each for each in self._registrations if each[0] == epoch]:
            del self._registrations[key]

    def _on_register(self, proxy_name: str, epoch: str, worker: str) -> None:
        proxy = self._cluster.proxies.get(proxy_name)
        if proxy is None or proxy.loop.is_dead or epoch not in {each.epoch for each in proxy.table.workers()}:
            return  # it has to
        self._registrations[epoch, proxy.proxy_id] += 1
        has_lost_messages = self._cluster.switch.changed_at(worker, proxy_name) > 0
        if self._registrations[epoch, proxy.proxy_id] > MAX_REGISTRATIONS and not has_lost_messages:
            self._report("a worker registers with a proxy that knows it", f"{worker} ({epoch}) with {proxy.proxy_id}")


def _has_news(message: Any) -> bool:
    if isinstance(message, WorkerStatus):
        updates = message.prefixes, message.tier_prefixes
        return message.pairs is not None or any(each is not None and each.restart for each in updates)
    if isinstance(message, ClusterView):
        return not message.known or message.restart or bool(message.workers or message.gone)
    return False
