"""Loads the cluster with locust at a growing rate of requests, and plots TTFT and ITL over time:

    python examples/load_test.py load.svg

The load is that of bench/locustfile.py, which has more options.
"""

import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

URL = os.environ.get("TANDEM_URL", "http://127.0.0.1:8000")
SECONDS = int(os.environ.get("LOAD_SECONDS", "40"))
ROOT = Path(__file__).parents[1]

with tempfile.TemporaryDirectory() as folder:
    command = [
        sys.executable, "-m", "locust", "-f", "bench/locustfile.py", "--headless", "--host", URL, "--users", "1",
        "--request-rate", "2", "--ramp-to", "20", "--ramp-s", str(SECONDS), "--run-time", f"{SECONDS}s",
        "--stop-timeout", "30", "--csv", f"{folder}/load", "--csv-full-history",
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True)
    with Path(folder, "load_stats_history.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["50%"] not in ("", "N/A")]

figure, plots = plt.subplots(2, 1, sharex=True, layout="constrained")
for plot, name in zip(plots, ("TTFT", "ITL"), strict=True):
    found = [row for row in rows if row["Name"] == name]
    times = [int(row["Timestamp"]) - int(rows[0]["Timestamp"]) for row in found]
    for percentile in ("50%", "99%"):
        plot.plot(times, [float(row[percentile]) for row in found], label=f"p{percentile[:-1]}")
    plot.set_ylabel(f"{name}, ms")
    plot.set_ylim(bottom=0)
    plot.legend()
plots[0].set_title("Requests per second grow from 2 to 20")
plots[1].set_xlabel("seconds")
figure.savefig(sys.argv[1])
print(f"plotted {len(rows)} measurements to {sys.argv[1]}")
