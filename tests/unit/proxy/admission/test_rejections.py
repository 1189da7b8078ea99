"""Which refusals the planner hears of."""

from __future__ import annotations

from tandem.proxy.admission.rejections import num_refused
from tandem.telemetry.proxy_metrics import ProxyMetrics


def test_refusals_that_more_workers_would_remedy_are_counted() -> None:
    metrics = ProxyMetrics()
    assert num_refused(metrics) == 0
    for reason in ("slo", "queue_full", "client_limit"):
        metrics.rejected.labels(reason).inc()
    assert num_refused(metrics) == 2, "the client's own limit does not count"
