"""Definitions of the latency figures, arrival times and aims."""

from __future__ import annotations

import random

import pytest

from bench.support.arrivals import Ramp, next_gap
from bench.support.latency import SLO, RequestTrace, goodput, percentile, summarise
from bench.support.report import Aim


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


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    traces = [
        RequestTrace(0.0, [1.0, 2.0], 1, 2),  # TTFT 1, TPOT 1
        RequestTrace(0.0, [0.5, 3.5, 4.0], 1, 3),  # TTFT 0.5, TPOT 1.75
        RequestTrace(0.0, [0.5], 1, 1),  # no TPOT
        RequestTrace(0.0, error="HTTP 503"),
    ]
    assert goodput(traces, SLO()) == 3 / 4
    assert goodput(traces, SLO(ttft_s=0.75)) == 2 / 4
    assert goodput(traces, SLO(tpot_s=1.5)) == 2 / 4
    assert goodput(traces, SLO(ttft_s=0.75, tpot_s=1.5, e2e_s=0.25)) == 0
    assert SLO(ttft_s=0.75).describe() == "TTFT 750 ms" and SLO().describe() == "no SLO"


@pytest.mark.parametrize("num_sources", [1, 4])
@pytest.mark.parametrize(
    ("ramp", "wanted"), [(Ramp(20, 20, 60), 2000), (Ramp(5, 35, 100), 2000), (Ramp(40, 0.1, 100), 2000)]
)
def test_arrivals_have_the_rate(ramp: Ramp, wanted: float, num_sources: int) -> None:
    """Counts the arrivals in 100 s with a fixed seed; a Poisson process of 2,000 has a standard deviation of 45."""
    rng = random.Random(7)
    num_arrivals = 0
    for _ in range(num_sources):
        now = 0.0
        while now < 99.9:
            now += next_gap(ramp, now, num_sources, rng)
            num_arrivals += now < 99.9
    assert num_arrivals == pytest.approx(wanted, abs=150)


def test_percentile_is_linear_between_neighbours() -> None:
    assert percentile([0.0, 10.0], 50) == 5.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 99) == pytest.approx(3.97)


@pytest.mark.parametrize(
    ("value", "better", "met"), [(1.0, "lower", True), (3.0, "lower", False), (3.0, "higher", True)]
)
def test_aims(value: float, better: str, met: bool) -> None:
    assert Aim.of("x", value, 2.0, better).met is met  # type: ignore[arg-type]
