"""The definitions behind every figure that bench/ prints."""

from __future__ import annotations

import pytest

from bench.latency import RequestTrace, percentile, summarise
from bench.report import Aim


def test_definitions() -> None:
    trace = RequestTrace(sent_at=10.0, chunk_times=[10.5, 10.6, 10.8], num_output_tokens=5)
    assert trace.ttft_s == pytest.approx(0.5)
    assert trace.e2e_s == pytest.approx(0.8)
    assert trace.tpot_s == pytest.approx(0.3 / 4)
    assert trace.itl_s == pytest.approx([0.1, 0.2])


def test_summary_counts_failures_apart() -> None:
    traces = [
        RequestTrace(0.0, [1.0, 2.0], 1, 2),
        RequestTrace(1.0, [2.0, 3.0, 4.0], 1, 4),
        RequestTrace(1.0, error="HTTP 503"),
        RequestTrace(1.0),
    ]
    figures = summarise(traces)
    assert (figures.num_requests, figures.num_completed) == (4, 2)
    assert figures.errors == {"HTTP 503": 1, "no output": 1}
    assert figures.duration_s == 4.0 and figures.output_tokens_per_s == 1.5
    assert figures.ttft_ms is not None and figures.ttft_ms.mean == 1000.0


def test_nothing_completed() -> None:
    figures = summarise([RequestTrace(0.0, error="ConnectionRefusedError")])
    assert figures.num_completed == 0 and figures.ttft_ms is None and figures.requests_per_s == 0.0


def test_percentile_is_linear_between_neighbours() -> None:
    assert percentile([0.0, 10.0], 50) == 5.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 99) == pytest.approx(3.97)


@pytest.mark.parametrize(
    ("value", "better", "met"), [(1.0, "lower", True), (3.0, "lower", False), (3.0, "higher", True)]
)
def test_aims(value: float, better: str, met: bool) -> None:
    assert Aim.of("x", value, 2.0, better).met is met  # type: ignore[arg-type]
