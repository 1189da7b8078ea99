"""The locust load test reports TTFT and ITL, and its tables agree with the figures of bench.support.latency."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import MODEL, Cluster

ROOT = Path(__file__).parents[2]


def test_locust_reports_ttft_and_itl(cluster: Cluster, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "locust", "-f", "bench/locustfile.py", "--headless", "--host", cluster.url,
        "--users", "4", "--spawn-rate", "4", "--run-time", "8s", "--stop-timeout", "60",
        "--model", MODEL, "--input-len", "16", "--output-len", "8", "--csv", str(tmp_path / "locust"),
    ]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stdout + run.stderr
    with (tmp_path / "locust_stats.csv").open() as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    num_requests = int(rows["/v1/completions"]["Request Count"])
    assert num_requests >= 1 and not any(int(row["Failure Count"]) for row in rows.values())
    assert int(rows["TTFT"]["Request Count"]) == int(rows["E2E"]["Request Count"]) == num_requests
    # One gap per chunk after the first; a token that holds back an incomplete character sends no chunk.
    assert 0 < int(rows["ITL"]["Request Count"]) <= 7 * num_requests


def test_locust_tables_agree_with_the_figures_of_the_same_run(cluster: Cluster, tmp_path: Path) -> None:
    """Locust measures independently; bench.support.latency uses the definitions of `vllm bench serve`."""
    file = tmp_path / "figures.json"
    command = [
        sys.executable, "-m", "locust", "-f", "bench/locustfile.py", "--headless", "--host", cluster.url,
        "--users", "2", "--spawn-rate", "2", "--run-time", "6s", "--stop-timeout", "60", "--request-rate", "3",
        "--ramp-to", "6", "--ramp-s", "5", "--slo-ttft-ms", "0.001", "--slo-tpot-ms", "600000",
        "--model", MODEL, "--input-len", "16", "--output-len", "8", "--figures", str(file),
    ]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(file.read_text())
    figures, tables = report["figures"], report["locust"]
    assert figures["num_completed"] == tables["TTFT"]["count"] == tables["TPOT"]["count"] >= 1
    for name in ("ttft", "tpot", "itl", "e2e"):
        assert tables[name.upper()]["mean_ms"] == pytest.approx(figures[f"{name}_ms"]["mean"], rel=0.02)
    assert report["goodput_per_s"] == 0, "no first token comes in a microsecond"
    assert "goodput: 0.00 requests/s within TTFT 0.001 ms, TPOT 600000 ms" in run.stdout
