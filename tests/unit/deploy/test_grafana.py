"""The Grafana dashboards are valid and query only metrics that exist."""

from __future__ import annotations

import re

from prometheus_client import generate_latest

from tandem.protocol.messages.membership import WorkerLoad
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.telemetry.worker_metrics import WorkerMetrics
from tests.support.grafana import dashboards, queries


def test_every_panel_has_an_id_of_its_own() -> None:
    assert len(dashboards()) == 4
    for dashboard in dashboards().values():
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert ids and len(set(ids)) == len(ids)


def test_metrics_in_dashboards_exist() -> None:
    worker = WorkerMetrics()
    worker.on_load(WorkerLoad(num_blocks=1))
    text = (generate_latest(ProxyMetrics().registry) + generate_latest(worker.registry)).decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    known = {
        name + suffix for name, kind in kinds.items() if kind == "histogram" for suffix in ("_bucket", "_sum", "_count")
    }
    known |= kinds.keys()
    asked = {name for _, _, expr in queries() for name in re.findall(r"\b(?:tandem|process)_\w+", expr)}
    assert asked <= known, sorted(asked - known)
    assert len(asked) > 30


def test_selectable_slos_are_bucket_limits() -> None:
    text = generate_latest(ProxyMetrics().registry).decode()
    variables = dashboards()["tandem-overview"]["templating"]["list"]
    for variable, metric in (
        ("ttft_slo", "tandem_time_to_first_token_seconds"),
        ("tpot_slo", "tandem_request_time_per_output_token_seconds"),
    ):
        [found] = [each for each in variables if each["name"] == variable]
        for bound in found["query"].split(","):
            assert f'{metric}_bucket{{le="{bound}"}}' in text
