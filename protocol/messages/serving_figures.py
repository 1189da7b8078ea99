"""What a proxy has served, in reports to the launcher and to commands."""

from __future__ import annotations

import msgspec


class LatencyBuckets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A histogram. bounds_s: ascending upper bounds. counts: one for each bound, and one above the last."""

    bounds_s: list[float]
    counts: list[int]


class PredictionFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Latencies that were predicted at the dispatch and then measured, as sums. error_s: of absolute differences."""

    num_measured: int
    predicted_s: float
    measured_s: float
    error_s: float


class ServingFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Totals of one proxy since its start, except num_waiting."""

    num_waiting: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_finished: int
    ttft: LatencyBuckets
    itl: LatencyBuckets
    e2e: LatencyBuckets
    stages_s: dict[str, float]
    """Seconds of finished sequences, by stage."""
    num_refused: int = 0
    """Requests refused for lack of capacity, without those above a client's limit."""
    predictions: dict[str, PredictionFigures] = {}
    """Predictions by latency (ttft, itl)."""
    placements: dict[str, int] = {}
    """Sequences by where they ran, see `telemetry.stages`."""
    stages: dict[str, LatencyBuckets] = {}
    """Times of finished sequences, by stage."""
