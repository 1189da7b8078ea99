"""The progress line counts tests and estimates the remaining time per stage."""

from __future__ import annotations

import pytest

from tests.progress import PRIOR_WEIGHT, TYPICAL_S, Progress

UNITS = [f"tests/unit/test_a.py::test_{number}" for number in range(100)]
FAULTS = [f"tests/faults/test_b.py::test_{number}" for number in range(10)]


def finish(progress: Progress, node_ids: list[str], seconds: float) -> None:
    for node_id in node_ids:
        progress.on_start(node_id)
        progress.on_phase(node_id, seconds)
        progress.on_end(node_id)


def test_tests_share_the_workers() -> None:
    progress = Progress(num_workers=2, started_s=0.0)
    progress.set_tests(UNITS + FAULTS)
    assert progress.remaining_s() == pytest.approx((100 * TYPICAL_S["unit"] + 10 * TYPICAL_S["faults"]) / 2)


def test_estimate_follows_the_measured_times() -> None:
    progress = Progress(num_workers=1, started_s=0.0)
    progress.set_tests(UNITS)
    finish(progress, UNITS[:90], 2.0)
    average_s = (PRIOR_WEIGHT * TYPICAL_S["unit"] + 180.0) / (PRIOR_WEIGHT + 90)
    assert progress.remaining_s() == pytest.approx(10 * average_s)
    finish(progress, UNITS[90:], 2.0)
    assert progress.remaining_s() == 0


def test_line_shows_counts_and_times() -> None:
    progress = Progress(num_workers=1, started_s=10.0)
    progress.set_tests(UNITS + FAULTS)
    finish(progress, UNITS[:11], TYPICAL_S["unit"])
    left_s = 89 * TYPICAL_S["unit"] + 10 * TYPICAL_S["faults"]
    expected = f"[ 11/110] 10 %, 1m40s so far, about {left_s // 60:.0f}m{left_s % 60:02.0f}s left"
    assert progress.line(110.0) == f"{expected}, running {UNITS[10]}"
