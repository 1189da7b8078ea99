"""Percentiles of what a histogram's buckets counted, as Prometheus' histogram_quantile gives them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def histogram_quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float | None:
    """Linear within a bucket; of what lies above the last finite bound, that bound. None where nothing was counted.

    bounds: upper ones, ascending, the last infinite. counts: of each bucket by itself.
    """
    rank = q * sum(counts)
    if rank <= 0:
        return None
    low = under = 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count and under + count >= rank:
            return low if math.isinf(bound) else low + (bound - low) * (rank - under) / count
        low, under = bound if not math.isinf(bound) else low, under + count
    return low
