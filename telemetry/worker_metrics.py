"""Prometheus metrics of one worker, on an HTTP endpoint of its own.

Gauges and counters are the values of the last heartbeat, so they cost nothing per step. Steps, prompts and transfers
are histograms. The endpoint's threads render, and take no lock that a step waits for.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http.server import ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, MetricsHandler, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tandem.runtime.errors import ConfigError

_GAUGES: Final = {
    "num_requests_running": ("num_running", "Sequences that compute."),
    "num_requests_waiting": ("num_waiting", "Sequences that wait for a step, for blocks or for their KV."),
    "num_waiting_tokens": ("num_waiting_tokens", "Prompt tokens that are still to be computed."),
    "kv_blocks": ("num_blocks", "KV blocks of the pool."),
    "kv_free_blocks": ("num_free_blocks", "KV blocks that no sequence holds, including cached ones."),
    "kv_cached_blocks": ("num_cached_blocks", "Free KV blocks that hold a prefix."),
    "kv_quarantined_blocks": ("num_quarantined_blocks", "KV blocks that a peer may still write to."),
    "prompt_tokens_per_second": ("prompt_tokens_per_s", "Recent rate while prompts were computed."),
    "loaded_tokens_per_second": ("loaded_tokens_per_s", "Recent rate while KV blocks were loaded from tiers."),
}
_COUNTERS: Final = {
    "prefix_cache_queries": ("num_prompt_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("num_cached_tokens", "Prompt tokens found in the prefix cache."),
    "prefix_cache_loaded": ("num_loaded_tokens", "Of these, prompt tokens whose KV was loaded from a tier."),
    "request_success": ("num_finished", "Sequences that this worker finished normally."),
    "num_preemptions": ("num_preempted", "Sequences that were preempted."),
    "spec_decode_num_draft_tokens": ("num_drafted_tokens", "Tokens that speculative decoding has proposed."),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Of these, tokens that were generated."),
    "role_changes": ("num_role_changes", "Times that this worker was given another role."),
    "kv_transfer_bytes": ("num_transferred_bytes", "KV bytes sent (prefill) or received (decode)."),
    "kv_compared_blocks": ("num_compared_blocks", "KV blocks whose checksums were compared."),
    "kv_kept_blocks": ("num_kept_blocks", "KV blocks of aborted transfers that stay in the prefix cache."),
    "kv_corrupt_blocks": ("num_corrupt_blocks", "KV blocks with a wrong checksum."),
    "media_encoded": ("num_media_encoded", "Images and videos encoded by this worker."),
    "media_found": ("num_media_found", "Images and videos whose embeddings came from another worker of the host."),
    "media_fetched_bytes": ("num_media_fetched_bytes", "Bytes of preprocessed media fetched from other hosts."),
}
_TIER_GAUGES: Final = {
    "blocks": ("num_blocks", "KV blocks that this worker can load from the tier."),
    "bytes": ("num_bytes", "Size of the tier, which other workers may share."),
    "max_bytes": ("max_bytes", "Limit on the tier's size; 0 if unknown."),
}
_TIER_COUNTERS: Final = {
    "stored_blocks": ("num_stored", "KV blocks stored in the tier."),
    "loaded_blocks": ("num_loaded", "KV blocks loaded from the tier."),
    "skipped_blocks": ("num_skipped", "KV blocks not stored because the tier was behind or failing."),
    "corrupt_blocks": ("num_corrupt", "KV blocks of the tier that were not whole."),
}
LOAD_FIELDS: Final = [field for field, _ in (*_GAUGES.values(), *_COUNTERS.values())]
"""Fields of the heartbeat's load report that are exported."""
TIER_FIELDS: Final = [field for field, _ in (*_TIER_GAUGES.values(), *_TIER_COUNTERS.values())]
"""Fields of each of its tiers that are exported, beside name and error."""

_STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_GAP_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1)
_LONG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TRANSFER_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class WorkerMetrics:
    """Call its methods on the loop, except `collect`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._load: Any = None  # the last heartbeat's load report
        self.registry.register(self)
        self.step = self._histogram("tandem_worker_step_seconds", "One step of the model.", _STEP_S)
        self.step_gap = self._histogram(
            "tandem_worker_step_gap_seconds", "From a step's end until the next one is on the device.", _GAP_S
        )
        self.queue = self._histogram(
            "tandem_worker_request_queue_time_seconds", "From a prompt's arrival to its first chunk.", _LONG_S
        )
        self.prefill = self._histogram(
            "tandem_worker_request_prefill_time_seconds", "From its first chunk to its first token.", _LONG_S
        )
        self.decode_wait = self._histogram(
            "tandem_worker_decode_wait_seconds", "From a sequence's complete KV to its first step.", _LONG_S
        )
        labels = ["prefill_worker", "decode_worker", "connector"]
        self._transfer = Histogram(
            "tandem_kv_transfer_seconds",
            "One shipment of KV blocks, from its start in the connector to its end; reported by the worker that sends.",
            labels,
            buckets=_TRANSFER_S,
            registry=self.registry,
        )
        self._transfer_bytes = Counter(
            "tandem_kv_transfer_bytes",
            "KV bytes shipped; reported by the worker that sends.",
            labels,
            registry=self.registry,
        )
        self._refusals = Counter(
            "tandem_worker_refusals",
            "Connections and messages that this worker's sockets refused, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._close: Callable[[], None] = lambda: None

    def on_refused(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    def on_load(self, load: object) -> None:
        """load: has the attributes `LOAD_FIELDS`, and `tiers` with `TIER_FIELDS`; it is not modified afterwards."""
        self._load = load

    def collect(self) -> Iterable[Any]:
        """Yields the values of the last load report; called by prometheus_client in the endpoint's thread."""
        load = self._load  # one read, because the loop may replace it
        if load is None:
            return
        for name, (field, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"tandem_worker_{name}", text, getattr(load, field))
        used = 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0
        yield GaugeMetricFamily(
            "tandem_worker_kv_cache_usage_perc", "Share of KV blocks that are held; 1 is all.", used
        )
        for name, (field, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"tandem_worker_{name}", text, getattr(load, field))
        yield from _tier_families(load.tiers)

    def on_shipped(self, pair: tuple[str, str, str], num_bytes: int, seconds: float) -> None:
        """pair: prefill worker, decode worker, connector."""
        self._transfer.labels(*pair).observe(seconds)
        self._transfer_bytes.labels(*pair).inc(num_bytes)

    def serve(self, host: str, port: int = 0) -> str:
        """Serves in a thread of its own; port 0 takes any free port. Returns host:port.

        Raises ConfigError when the address cannot be bound.
        """
        try:
            endpoint = MetricsEndpoint(host, port, self.registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port} ({error.strerror or error}); choose another --admin-host"
            ) from error
        self._close = endpoint.close
        return f"[{host}]:{endpoint.server_port}" if ":" in host else f"{host}:{endpoint.server_port}"

    def close(self) -> None:
        with suppress(OSError):
            self._close()
        self._close = lambda: None

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, documentation, buckets=buckets, registry=self.registry)


def _tier_families(tiers: Iterable[Any]) -> Iterator[Any]:
    """Yields the metrics of the tiers below the KV pool, with a sample for each tier."""
    kinds = ((GaugeMetricFamily, _TIER_GAUGES), (CounterMetricFamily, _TIER_COUNTERS))
    for kind, names in kinds:
        for name, (field, text) in names.items():
            family = kind(f"tandem_worker_kv_tier_{name}", text, labels=["tier"])
            for tier in tiers:
                family.add_metric([tier.name], getattr(tier, field))
            yield family
    failing = GaugeMetricFamily("tandem_worker_kv_tier_failing", "1 while the tier is not used.", labels=["tier"])
    for tier in tiers:
        failing.add_metric([tier.name], float(bool(tier.error)))
    yield failing


log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
"""Connections at a time, with a thread each. A further one ends the oldest, so that a scrape is always served."""
IO_TIMEOUT_S = 10.0
"""How long a client may take to send or to read something."""


class MetricsEndpoint(ThreadingHTTPServer):
    """Serves the registry's metrics from its own thread until `close`.

    Clients that send nothing, or read nothing, cannot exhaust it.
    """

    daemon_threads = True
    request_queue_size = 128  # with the default of 5, the kernel drops connections that arrive at once, for seconds

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Raises OSError when the address cannot be bound. port: 0 takes any free one."""
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # in the order of arrival
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        handler = type("Handler", (MetricsHandler,), {"registry": registry, "timeout": IO_TIMEOUT_S})
        super().__init__((host, port), handler)
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(1.0)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > MAX_CONNECTIONS else None
            if oldest is not None:
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # else the client has left
            log.error("a request for metrics failed", exc_info=error)
