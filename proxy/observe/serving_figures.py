"""The metrics of this process since its start as plain numbers, for `tandem status`."""

from __future__ import annotations

from prometheus_client import Histogram

from tandem.protocol.messages.serving_figures import LatencyBuckets, PredictionFigures, ServingFigures
from tandem.proxy.admission.admission import Admission
from tandem.proxy.dispatch.generation import CAPACITY_REASONS
from tandem.telemetry.proxy_metrics import PREDICTED, Predictions, ProxyMetrics
from tandem.telemetry.stages import PLACEMENTS


def serving_figures(metrics: ProxyMetrics, admission: Admission) -> ServingFigures:
    metrics.per_token.flush()
    return ServingFigures(
        num_waiting=admission.num_waiting,
        num_prompt_tokens=int(metrics.prompt_tokens._value.get()),
        num_output_tokens=int(metrics.generation_tokens._value.get()),
        num_finished=int(sum(bucket.get() for bucket in metrics.e2e._buckets)),
        ttft=_buckets(metrics.ttft),
        itl=_buckets(metrics.per_token.itl),
        e2e=_buckets(metrics.e2e),
        stages_s={name: stage._sum.get() for name, stage in metrics.stages.items()},
        num_refused=int(sum(metrics.rejected.labels(reason)._value.get() for reason in CAPACITY_REASONS)),
        predictions={latency: _predictions(metrics.predictions, latency) for latency in PREDICTED},
        placements={each: int(metrics.placements.labels(each)._value.get()) for each in PLACEMENTS},
        stages={name: _buckets(stage) for name, stage in metrics.stages.items()},
    )


def _predictions(predictions: Predictions, latency: str) -> PredictionFigures:
    return PredictionFigures(
        int(predictions.count.labels(latency)._value.get()),
        predictions.predicted_s.labels(latency)._value.get(),
        predictions.measured_s.labels(latency)._value.get(),
        predictions.error_s.labels(latency)._value.get(),
    )


def _buckets(histogram: Histogram) -> LatencyBuckets:
    # prometheus_client has no public way to read single values. They are of this process, also in a shared folder.
    *bounds, _ = histogram._upper_bounds
    return LatencyBuckets(list(bounds), [int(bucket.get()) for bucket in histogram._buckets])
