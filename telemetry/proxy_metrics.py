"""Prometheus metrics of the proxies. Names follow vLLM's, with `tandem_` in front, so that dashboards carry over.

TTFT: arrival of the HTTP request to the first token. ITL: between two token messages of one sequence. TPOT: mean time
per output token after the first. E2E: arrival to the last piece of text. The stages of
`telemetry.stages` add up to it.

Where PROMETHEUS_MULTIPROC_DIR is set (the launcher does so), prometheus_client keeps all values in files there, one set
for each process, and any process renders the sum. Counters of a process that has ended keep their value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterable
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.values import MutexValue, ValueClass

from tandem.telemetry.stages import PLACEMENTS, STAGES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LONG_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, 7.5, 10, 15, 20, 30, 40, 60, 80, 120,
    160, 320, 640, 2560,
)  # fmt: skip
_STEP_S = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10,
)  # fmt: skip
_STAGE_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, *_LONG_S[:-1])

PREDICTED: Final = ("ttft", "itl")
"""Latencies that the router predicts. ttft begins at the dispatch; itl is the mean of a sequence, thus its TPOT."""

_FLUSH_INTERVAL_S = 1.0
"""How often per-token counts are added to prometheus_client, where one shared observation takes about 5 us."""


class ProxyMetrics:
    """One instance per proxy, with a registry of its own, so that tests can make as many as they like."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "tandem_requests",
            "HTTP requests for generation that have ended, by outcome: stop, length, aborted or an error's code.",
            "outcome",
        )
        self.prompt_tokens = self._counter("tandem_prompt_tokens", "Prompt tokens of dispatched sequences.")
        self.cached_prompt_tokens = self._counter(
            "tandem_cached_prompt_tokens", "Prompt tokens that workers found in their prefix cache."
        )
        self.preempted = self._counter(
            "tandem_preemptions",
            "Sequences that a worker gave up for lack of KV blocks, and that were dispatched again.",
        )
        self.migrated = self._counter("tandem_migrations", "Sequences that lost a worker and migrated to another.")
        self.generation_tokens = self._counter("tandem_generation_tokens", "Tokens generated for clients.")
        self.refusals = self._counter(
            "tandem_refusals", "Connections and messages that this proxy's sockets refused, by reason.", "reason"
        )
        self.rejected = self._counter(
            "tandem_rejections",
            "Requests and connections refused, by reason: queue_full, client_limit, slo, no_room or connections.",
            "reason",
        )
        for reason in ("queue_full", "client_limit", "slo", "no_room", "connections"):
            self.rejected.labels(reason)  # exported from the start, so that `increase` sees the first one
        self.free_tools = self._counter(
            "tandem_unconstrained_tools",
            "Tools of requests whose calls are not held to the tool's schema, by reason: invalid (the schema, or a "
            "keyword that is not supported), size (of all tools together) or limits (on the work of checking).",
            "reason",
        )
        for reason in ("invalid", "size", "limits"):
            self.free_tools.labels(reason)
        self.records = self._counter(
            "tandem_records",
            "Records of requests, by outcome: written, too_large, slow_disk (too many waited for the disk) or "
            "disk_error.",
            "outcome",
        )
        for outcome in ("written", "too_large", "slow_disk", "disk_error"):
            self.records.labels(outcome)
        self.running = self._gauge("tandem_num_requests_running", "Sequences in flight.", "livesum")
        self.waiting = self._gauge(
            "tandem_num_requests_waiting", "Sequences that wait for their first token.", "livesum"
        )
        self.placements = self._counter(
            "tandem_placements",
            "Sequences with a first token, by where they ran: same (prefill and decode on one worker), two, deflected "
            "(one worker of role decode) or prefill_only (one token was requested).",
            "placement",
        )
        for placement in PLACEMENTS:
            self.placements.labels(placement)
        self.predictions = Predictions(self.registry)
        self.workers = self._gauge("tandem_workers", "Workers that are registered, by role.", "livemax", "role")
        self.unanswered = self._gauge("tandem_unanswered_workers", "Workers that do not answer a proxy.", "livemax")
        self.worker_role = self._gauge(
            "tandem_worker_role", "1 for the current role of each worker, else 0.", "livemax", "worker", "role"
        )
        self.restarts = self._gauge(
            "tandem_worker_restarts",
            "Times that a worker has come back, restarted or from silence, as the proxies saw it.",
            "max",
            "worker",
        )
        self.ttft = self._histogram("tandem_time_to_first_token_seconds", "TTFT.", _LONG_S)
        self.per_token = TokenTally(
            self._histogram("tandem_inter_token_latency_seconds", "ITL.", _STEP_S),
            self.generation_tokens,
        )
        self.tpot = self._histogram("tandem_request_time_per_output_token_seconds", "TPOT.", _STEP_S)
        self.e2e = self._histogram("tandem_e2e_request_latency_seconds", "E2E.", _LONG_S)
        self.stages = {
            name: self._histogram(f"tandem_request_{name}_time_seconds", documentation, _STAGE_S)
            for name, documentation in STAGES.items()
        }
        self._seen: set[str] = set()
        self._roles: set[tuple[str, str]] = set()

    def on_joined(self, worker_id: str) -> None:
        """Counts a worker that has registered; one whose name is known was restarted."""
        restarts = self.restarts.labels(worker_id)
        if worker_id in self._seen:
            restarts.inc()
        self._seen.add(worker_id)

    def on_workers(self, workers: Iterable[tuple[str, str]]) -> None:
        """workers: (worker_id, current role) of all registered ones. Call when they, or their roles, have changed."""
        before, self._roles = self._roles, set(workers)
        for worker_id, role in before ^ self._roles:
            self.worker_role.labels(worker_id, role).set((worker_id, role) in self._roles)
        counts = Counts(role for _, role in self._roles)
        for role in {role for _, role in before} | counts.keys():
            self.workers.labels(role).set(counts[role])

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, labels, registry=self.registry)

    def _gauge(self, name: str, documentation: str, merge: Literal["livesum", "livemax", "max"], *labels: str) -> Gauge:
        """merge: how the values of several proxies become one; `live` leaves out those that have ended."""
        return Gauge(name, documentation, labels, registry=self.registry, multiprocess_mode=merge)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, documentation, buckets=buckets, registry=self.registry)

    def render(self) -> bytes:
        """Returns the text exposition format, with the values of all processes that share PROMETHEUS_MULTIPROC_DIR."""
        text: bytes = generate_latest(self._merged_registry())
        return text

    def _merged_registry(self) -> CollectorRegistry:
        if ValueClass is MutexValue:
            return self.registry
        registry = CollectorRegistry()  # values are in files
        MultiProcessCollector(registry)
        return registry


class TokenTally:
    """Collects per-token counts in plain lists and adds them to prometheus_client now and then."""

    def __init__(self, itl: Histogram, num_tokens: Counter) -> None:
        self.itl = itl
        self._counter = num_tokens
        self._bounds: list[float] = list(itl._upper_bounds)  # the last is infinite
        self._counts = [0] * len(self._bounds)
        self._sum_s = 0.0
        self._num_tokens = 0
        self._flushed_at = 0.0

    def on_tokens(self, now: float, num_tokens: int, itl_s: float | None) -> None:
        """now: seconds of a monotonic clock. itl_s: since the previous tokens; None for the first of a sequence."""
        self._num_tokens += num_tokens
        if itl_s is not None:
            self._counts[bisect_left(self._bounds, itl_s)] += 1
            self._sum_s += itl_s
        if now - self._flushed_at >= _FLUSH_INTERVAL_S:
            self._flushed_at = now
            self.flush()

    def flush(self) -> None:
        if not self._num_tokens:
            return
        # prometheus_client has no public way to add many observations at once. `observe` adds to the same values.
        for bucket, count in zip(self.itl._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self.itl._sum.inc(self._sum_s)
        self._counter.inc(self._num_tokens)
        self._counts = [0] * len(self._bounds)
        self._sum_s = 0.0
        self._num_tokens = 0


class Predictions:
    """Predicted and measured latencies of sequences as sums, so that their ratio and the mean error can be derived."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, documentation: str) -> Counter:
            made = Counter(name, documentation, ["latency"], registry=registry)
            for latency in PREDICTED:
                made.labels(latency)  # exported from the start
            return made

        self.count = counter("tandem_predictions", "Predicted latencies that were measured: ttft or itl of a sequence.")
        self.predicted_s = counter("tandem_predicted_seconds", "Sum of the predicted latencies.")
        self.measured_s = counter("tandem_measured_seconds", "Sum of the same latencies as measured.")
        self.error_s = counter("tandem_prediction_error_seconds", "Sum of the absolute differences of both.")

    def observe(self, latency: str, predicted_s: float, measured_s: float) -> None:
        """latency: one of PREDICTED."""
        self.count.labels(latency).inc()
        self.predicted_s.labels(latency).inc(predicted_s)
        self.measured_s.labels(latency).inc(measured_s)
        self.error_s.labels(latency).inc(abs(measured_s - predicted_s))
