"""Percentiles, rates and bandwidths between two status reports, whose counters run since the start. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.protocol.messages.membership import LatencyBuckets, PredictionFigures, ServingFigures, StatusReport

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class RateSample:
    """Reports of all proxies. at: seconds of a monotonic clock."""

    at: float
    reports: Sequence[StatusReport]

    def figures(self) -> dict[str, ServingFigures]:
        return {report.proxy_id: report.figures for report in self.reports if report.figures is not None}


@dataclass(frozen=True, slots=True)
class PredictionMeans:
    """Means over the latencies that were predicted and measured. error_s: of the absolute difference."""

    predicted_s: float
    measured_s: float
    error_s: float


@dataclass(frozen=True, slots=True)
class ServingRates:
    """What a cluster has served lately. Rates are None without an earlier sample."""

    num_waiting: int
    num_finished: int
    ttft_s: list[float | None]
    """Time to first token at QUANTILES; None without samples."""
    itl_s: list[float | None]
    """Inter-token latency at QUANTILES; None without samples."""
    e2e_s: list[float | None]
    """Duration of requests at QUANTILES; None without samples."""
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    finished_per_s: float | None
    stages_s: dict[str, float]
    """Mean duration of each stage."""
    bandwidth: dict[tuple[str, str], float] = field(default_factory=dict)
    """Bytes per second by (prefill, decode) worker while blocks moved."""
    predictions: dict[str, PredictionMeans] = field(default_factory=dict)
    """Predicted latencies (ttft, itl) that have samples."""
    placements: dict[str, int] = field(default_factory=dict)
    """Sequences by where they ran."""


def rates(now: RateSample, then: RateSample | None) -> ServingRates:
    """Figures since the sample `then`, or since the start if it is None. Restarted proxies count from their restart."""
    before = then.figures() if then is not None else {}
    pairs = [(figures, before.get(proxy_id)) for proxy_id, figures in now.figures().items()]
    span_s = now.at - then.at if then is not None else 0.0

    def grown(name: str) -> int:
        return sum(getattr(new, name) - (getattr(old, name) if old is not None else 0) for new, old in pairs)

    def per_s(name: str) -> float | None:
        return grown(name) / span_s if span_s > 0 else None

    def quantiles(name: str) -> list[float | None]:
        return _quantiles([(getattr(new, name), getattr(old, name) if old is not None else None) for new, old in pairs])

    num_finished = grown("num_finished")
    stages_s: dict[str, float] = {}
    for new, old in pairs:
        for stage, seconds in new.stages_s.items():
            since = seconds - (old.stages_s.get(stage, 0.0) if old is not None else 0.0)
            stages_s[stage] = stages_s.get(stage, 0.0) + since / max(1, num_finished)
    placements: dict[str, int] = {}
    for new, old in pairs:
        for where, count in new.placements.items():
            since = count - (old.placements.get(where, 0) if old is not None else 0)
            placements[where] = placements.get(where, 0) + since
    return ServingRates(
        num_waiting=sum(new.num_waiting for new, _ in pairs),
        num_finished=num_finished,
        ttft_s=quantiles("ttft"),
        itl_s=quantiles("itl"),
        e2e_s=quantiles("e2e"),
        output_tokens_per_s=per_s("num_output_tokens"),
        prompt_tokens_per_s=per_s("num_prompt_tokens"),
        finished_per_s=per_s("num_finished"),
        stages_s=stages_s,
        bandwidth=_bandwidth(now, then),
        predictions=_predictions(pairs),
        placements=placements,
    )


def _predictions(pairs: list[tuple[ServingFigures, ServingFigures | None]]) -> dict[str, PredictionMeans]:
    means = {}
    none = PredictionFigures(0, 0.0, 0.0, 0.0)
    for latency in dict.fromkeys(latency for new, _ in pairs for latency in new.predictions):
        both = [
            (new.predictions.get(latency, none), old.predictions.get(latency, none) if old is not None else none)
            for new, old in pairs
        ]
        if num_measured := sum(new.num_measured - old.num_measured for new, old in both):
            means[latency] = PredictionMeans(
                sum(new.predicted_s - old.predicted_s for new, old in both) / num_measured,
                sum(new.measured_s - old.measured_s for new, old in both) / num_measured,
                sum(new.error_s - old.error_s for new, old in both) / num_measured,
            )
    return means


def _quantiles(pairs: list[tuple[LatencyBuckets, LatencyBuckets | None]]) -> list[float | None]:
    if not pairs:
        return [None] * len(QUANTILES)
    limits = [*pairs[0][0].bounds_s, math.inf]
    counts = [0] * len(limits)
    for new, old in pairs:
        for i, count in enumerate(new.counts):
            counts[i] += count - (old.counts[i] if old is not None else 0)
    return [histogram_quantile(limits, counts, q) for q in QUANTILES]


def stage_medians(now: RateSample) -> dict[str, float]:
    """Median duration of each stage since the start of the proxies."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for figures in now.figures().values() for name in figures.stages):
        buckets = [figures.stages[name] for figures in now.figures().values() if name in figures.stages]
        limits = [*buckets[0].bounds_s, math.inf]
        median = histogram_quantile(
            limits, [sum(counts) for counts in zip(*(b.counts for b in buckets), strict=True)], 0.5
        )
        if median is not None:
            found[name] = median
    return found


def histogram_quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float | None:
    """Percentile as Prometheus computes it: interpolated within a bucket, the last finite bound for values above it.

    bounds: upper bounds, ascending, the last one infinite. counts: per bucket, not cumulative. None if all are 0.
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


def _bandwidth(now: RateSample, then: RateSample | None) -> dict[tuple[str, str], float]:
    found = {}
    old = _traffic(then) if then is not None else {}
    for key, (num_bytes, seconds) in _traffic(now).items():
        old_bytes, old_s = old.get(key, (0, 0.0))
        if seconds > old_s:
            found[key[0], key[2]] = (num_bytes - old_bytes) / (seconds - old_s)
    return found


def _traffic(sample: RateSample) -> dict[tuple[str, str, str], tuple[int, float]]:
    """(bytes, seconds) by prefill worker, its epoch, and decode worker. Every proxy reports all workers."""
    return {
        (report.worker.worker_id, report.worker.epoch, each.decode_worker_id): (each.num_bytes, each.shipping_s)
        for report in (sample.reports[0].workers if sample.reports else [])
        for each in report.load.traffic
    }
