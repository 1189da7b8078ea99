"""Reasons of rejected requests, as the metrics label them."""

from __future__ import annotations

from tandem.proxy.admission.admission import ClientLimitExceeded, QueueFull
from tandem.proxy.cluster.router import SLOUnreachable
from tandem.runtime.errors import Overloaded, TandemError
from tandem.telemetry.proxy_metrics import ProxyMetrics

CAPACITY_REASONS = ("queue_full", "slo", "no_room")
"""Reasons that more workers would remedy. A client that exceeds its own limit is not among them."""


def rejection_reason(error: TandemError) -> str | None:
    """Returns the label of a refusal by a limit, or None for any other error."""
    match error:
        case ClientLimitExceeded():
            return "client_limit"
        case QueueFull():
            return "queue_full"
        case SLOUnreachable():
            return "slo"
        case Overloaded():
            return "no_room"
        case _:
            return None


def num_refused(metrics: ProxyMetrics) -> int:
    """Returns how many requests this process has refused that more workers would have served."""
    # prometheus_client has no public way to read single values. They are of this process, also in a shared folder.
    return int(sum(metrics.rejected.labels(reason)._value.get() for reason in CAPACITY_REASONS))
