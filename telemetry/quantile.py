"""Percentiles from histogram buckets, computed as Prometheus' histogram_quantile does. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def histogram_quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float | None:
    """Interpolates within a bucket; the last finite bound for values above it. Returns None for an empty histogram.

    bounds: upper bounds, ascending, the last one infinite. counts: per bucket, not cumulative.
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
