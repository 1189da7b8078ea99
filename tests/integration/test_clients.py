"""Load generators that are not ours run unchanged against a cluster."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

from tests.cluster import MODEL, Cluster

ROOT = Path(__file__).parents[2]


def test_locust_tells_ttft_and_itl(cluster: Cluster, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "locust", "-f", "bench/locustfile.py", "--headless", "--host", cluster.url,
        "--users", "4", "--spawn-rate", "4", "--run-time", "4s", "--stop-timeout", "20",
        "--model", MODEL, "--input-len", "16", "--output-len", "8", "--csv", str(tmp_path / "told"),
    ]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert run.returncode == 0, run.stdout + run.stderr
    with (tmp_path / "told_stats.csv").open() as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    num_requests = int(rows["/v1/completions"]["Request Count"])
    assert num_requests >= 1 and not any(int(row["Failure Count"]) for row in rows.values())
    assert int(rows["TTFT"]["Request Count"]) == int(rows["E2E"]["Request Count"]) == num_requests
    # One gap for each chunk after the first; tokens that hold a character back make no chunk of their own.
    assert 0 < int(rows["ITL"]["Request Count"]) <= 7 * num_requests
