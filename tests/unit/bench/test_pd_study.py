"""The study of ratios, less its clusters: what it asks of whom, what it concludes, and its plot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.core_share import NoCoreShares, core_shares
from bench.pd_figures import draw_pd_study, pd_table, verdicts


def row(configuration: str, shape: str, load: float, good: float, **more: float) -> dict[str, Any]:
    told = {"ttft_ms_p50": 20.0, "itl_ms_p99": 5.0, **more}
    return {"configuration": configuration, "shape": shape, "load": load, "good": good, **told}


ROWS = [
    row("1 engine", "64:256", 0.5, 0.9),
    row("2 engines", "64:256", 0.5, 0.95, itl_ms_p99=10.0),
    row("1P1D", "64:256", 0.5, 0.7),
    row("1P2D", "64:256", 0.5, 0.8, itl_ms_p99=5.0, ttft_ms_p50=30.0),
]


def test_the_plot_shows_what_was_measured(tmp_path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    limits = {"64:256": {"ttft_ms_at_most": 40.0, "tpot_ms_at_most": 10.0}}
    figure = draw_pd_study(plt, {"rows": ROWS, "calibrations": limits})
    good, ttft, itl = ([patch.get_height() for patch in panel.patches] for panel in figure.axes)
    assert good == pytest.approx([90, 95, 70, 80])
    assert ttft == pytest.approx([50, 50, 50, 75]) and itl == pytest.approx([50, 100, 50, 50])
    plt.close(figure)


def test_the_table_has_every_row() -> None:
    more = dict.fromkeys(("goodput_per_s_per_worker", "tokens_per_s_per_worker", "ttft_ms_p99", "itl_ms_p50"), 1.5)
    lines = pd_table({"rows": [{**row, **more} for row in ROWS], "cores_per_worker": 0.4})
    assert lines[0] == "Cores for each worker: 0.4." and len(lines) == 4 + len(ROWS)
    assert lines[-1] == "| 64:256 | 0.5 | 1P2D | 80% | 1.5 | 1.5 | 30.0 | 1.5 | 1.5 | 5.0 |"


def test_the_best_of_each_kind_are_compared_for_every_shape_and_load() -> None:
    rows = [*ROWS, row("1P1D", "1024:16", 0.5, 0.5), row("1 engine", "1024:16", 0.5, 0.4), row("1P1D", "x", 0.8, 1.0)]
    first, second = verdicts(rows)  # of the last shape there is nothing to compare
    assert (first["shape"], first["best_apart"], first["best_both"]) == ("64:256", "1P2D", "2 engines")
    assert (first["good_apart"], first["good_both"]) == (0.8, 0.95)
    assert (first["itl_p99_apart_over_both"], first["ttft_p50_apart_over_both"]) == (0.5, 1.5)
    assert (second["shape"], second["best_apart"], second["best_both"]) == ("1024:16", "1P1D", "1 engine")


BURN = """
import time
input()
started = time.monotonic(), time.process_time()
while (used_s := time.process_time() - started[1]) < 0.1:
    pass
print(time.monotonic() - started[0], used_s)
"""


def test_a_process_gets_its_share_of_a_core_and_no_more() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            with core_shares({process.pid: 0.2}):
                told, _ = process.communicate("\n", timeout=60)
        except NoCoreShares as error:
            process.kill()
            pytest.skip(str(error))
    elapsed_s, used_s = map(float, told.split())
    assert elapsed_s > 0.9 * used_s / 0.2
