"""Percentiles from buckets equal Prometheus's and differ from the true ones by at most one bucket."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.deploy.operations.serving_rates import histogram_quantile

BOUNDS = [0.1, 0.2, 0.5, 1.0, math.inf]


def test_percentiles_are_linear_within_a_bucket() -> None:
    assert histogram_quantile(BOUNDS, [0, 10, 0, 0, 0], 0.5) == pytest.approx(0.15)
    assert histogram_quantile(BOUNDS, [5, 0, 5, 0, 0], 0.9) == pytest.approx(0.44)
    assert histogram_quantile(BOUNDS, [0, 0, 0, 0, 3], 0.5) == 1.0, "values above the last bucket count as its limit"
    assert histogram_quantile(BOUNDS, [0] * 5, 0.5) is None


@given(st.lists(st.floats(0, 0.999), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_percentile_lies_in_the_bucket_of_the_true_one(values: list[float], q: float) -> None:
    counts = [sum(low < v <= high for v in values) for low, high in zip([-1.0, *BOUNDS], BOUNDS, strict=False)]
    found = histogram_quantile(BOUNDS, counts, q)
    assert found is not None
    true = sorted(values)[min(len(values) - 1, math.ceil(q * len(values) - 1e-9) - 1)]
    low, high = next(pair for pair in zip([-1.0, *BOUNDS], BOUNDS, strict=False) if pair[0] < true <= pair[1])
    assert low - 1e-9 <= found <= high + 1e-9
