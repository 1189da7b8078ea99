"""Compares the wall clocks of other hosts with this host's, by the Date of their workers' /metrics. Shell."""

from __future__ import annotations

import http.client
import ipaddress
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime

from tandem.protocol.messages.membership import WorkerInfo
from tandem.runtime.host import is_elsewhere

_TIMEOUT_S = 2.0
_THREADS = 16
_RESOLUTION_S = 1.0
"""HTTP dates are cut to whole seconds."""


def clock_offsets(workers: Iterable[WorkerInfo]) -> dict[str, float]:
    """Returns the wall clock of each worker on another host minus this host's, where it can be reached.

    Workers that serve /metrics on a loopback address cannot be. Takes at most a few seconds.
    """
    asked = [
        worker
        for worker in workers
        if is_elsewhere(worker.host_id) and worker.metrics_address and not _is_loopback(worker.metrics_address)
    ]
    if not asked:
        return {}
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda worker: clock_offset(worker.metrics_address), asked)
        return {
            worker.worker_id: offset_s for worker, offset_s in zip(asked, found, strict=True) if offset_s is not None
        }


def clock_offset(address: str, clock: Callable[[], float] = time.time) -> float | None:
    """Returns by how many seconds the clock there is ahead; None without an answer. address: host:port of /metrics."""
    sent_at = clock()
    try:
        connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            date = answer.getheader("Date", "")
            answer.read()
        finally:
            connection.close()
        told = parsedate_to_datetime(date).timestamp()
    except (OSError, http.client.HTTPException, ValueError):
        return None
    return offset_of(told, sent_at, clock())


def offset_of(told: float, sent_at: float, received_at: float) -> float:
    """Returns the offset that the date shows for certain: 0 if both clocks may agree."""
    if told > received_at:
        return told - received_at
    latest = told + _RESOLUTION_S
    return min(0.0, latest - sent_at)


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
