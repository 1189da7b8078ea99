"""The committed dashboards match the code and use existing metrics."""

from __future__ import annotations

import json
import re

import pytest
from prometheus_client import generate_latest

from tandem.deploy.grafana.dashboards import DASHBOARDS, FOLDER, OVERVIEW, Dashboard, rendered
from tandem.protocol.messages.membership import WorkerLoad
from tandem.telemetry.metrics import ProxyMetrics
from tandem.telemetry.worker_metrics import WorkerMetrics


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_dashboard_files_match_the_code(dashboard: Dashboard) -> None:
    found = (FOLDER / f"{dashboard.uid}.json").read_text()
    assert found == rendered(dashboard), "run: python -m tandem.deploy.grafana.dashboards"
    ids = [panel["id"] for panel in json.loads(found)["panels"]]
    assert len(set(ids)) == len(ids) == len(dashboard.panels())


def test_metrics_in_dashboards_exist() -> None:
    worker = WorkerMetrics()
    worker.on_load(WorkerLoad(num_blocks=1))
    text = (generate_latest(ProxyMetrics().registry) + generate_latest(worker.registry)).decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    known = {
        name + suffix for name, kind in kinds.items() if kind == "histogram" for suffix in ("_bucket", "_sum", "_count")
    }
    known |= kinds.keys()
    asked = {
        name
        for dashboard in DASHBOARDS
        for panel in dashboard.panels()
        for query in panel.queries
        for name in re.findall(r"\b(?:tandem|process)_\w+", query.expr)
    }
    assert asked <= known, sorted(asked - known)
    assert len(asked) > 30


def test_selectable_slos_are_bucket_limits() -> None:
    text = generate_latest(ProxyMetrics().registry).decode()
    for variable, metric in (
        ("ttft_slo", "tandem_time_to_first_token_seconds"),
        ("tpot_slo", "tandem_request_time_per_output_token_seconds"),
    ):
        [found] = [each for each in OVERVIEW.variables if each["name"] == variable]
        for bound in found["query"].split(","):
            assert f'{metric}_bucket{{le="{bound}"}}' in text
