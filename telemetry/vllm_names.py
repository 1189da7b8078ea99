"""Tandem's metrics under vLLM's names, for dashboards and for the Gateway API's endpoint picker. Pure.

Types and labels (model_name, engine) are vLLM's. `engine` is always 0, because a cluster appears as one engine. The
histograms have vLLM's bounds, which are a subset of Tandem's, so their counts are exact.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import CollectorRegistry

# fmt: off
TTFT_BOUNDS_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)
ITL_BOUNDS_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
E2E_BOUNDS_S: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)
# fmt: on
_HISTOGRAMS: Final = {
    "tandem_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds", TTFT_BOUNDS_S),
    "tandem_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", ITL_BOUNDS_S),
    "tandem_request_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds", ITL_BOUNDS_S),
    "tandem_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds", E2E_BOUNDS_S),
}
_COUNTERS: Final = {
    "tandem_prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
    "tandem_cached_prompt_tokens": ("vllm:prefix_cache_hits",),
    "tandem_generation_tokens": ("vllm:generation_tokens",),
}


class Load(Protocol):
    """The counts of a worker's report that are needed here."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...


def load_gauges(loads: Iterable[Load]) -> dict[str, float]:
    """Returns sums over all workers, and the share of their KV blocks that requests use (0 to 1), by vLLM's name."""
    known = list(loads)
    num_blocks = sum(load.num_blocks for load in known)
    num_free = sum(load.num_free_blocks for load in known)
    return {
        "num_requests_running": float(sum(load.num_running for load in known)),
        "num_requests_waiting": float(sum(load.num_waiting for load in known)),
        "kv_cache_usage_perc": 1 - num_free / num_blocks if num_blocks else 0.0,
    }


def adapter_gauge(adapters: Sequence[str]) -> Metric:
    """Returns the adapters that requests may name. All of them are loaded, so none ever waits."""
    gauge = Metric("vllm:lora_requests_info", "Tandem: the loaded LoRA adapters.", "gauge")
    labels = {
        "max_lora": str(len(adapters)),
        "running_lora_adapters": ",".join(adapters),
        "waiting_lora_adapters": "",
    }
    gauge.add_sample(gauge.name, labels, time.time())
    return gauge


def cache_gauge(block_size: int, num_blocks: int) -> Metric:
    """num_blocks: of the whole cluster."""
    gauge = Metric("vllm:cache_config_info", "Tandem: the KV cache of the whole cluster.", "gauge")
    gauge.add_sample(gauge.name, {"engine": "0", "block_size": str(block_size), "num_gpu_blocks": str(num_blocks)}, 1.0)
    return gauge


def vllm_text(
    families: Iterable[Metric], gauges: dict[str, float], model: str, information: Sequence[Metric] = ()
) -> bytes:
    """Returns the text exposition format. families: those of the proxies; gauges: of `load_gauges`; information: gauges
    that are added as they are."""
    registry = CollectorRegistry()
    renamed = _renamed(families, gauges, {"model_name": model, "engine": "0"})
    registry.register(_Made([*renamed, *information]))
    text: bytes = generate_latest(registry)
    return text


def orca_header(wanted: str, gauges: dict[str, float]) -> dict[str, str]:
    """Returns the answer's ORCA load report in the format of the request's header, or nothing for another format."""
    named = {name: gauges[name] for name in ("kv_cache_usage_perc", "num_requests_waiting")}
    match wanted.lower():
        case "text":
            report = "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
        case "json":
            values = ", ".join(f'"{name}": {value}' for name, value in named.items())
            report = f'JSON {{"named_metrics": {{{values}}}}}'
        case _:
            return {}
    return {"endpoint-load-metrics": report}


def _renamed(families: Iterable[Metric], gauges: dict[str, float], labels: dict[str, str]) -> Iterable[Metric]:
    for name, value in gauges.items():
        gauge = Metric(f"vllm:{name}", f"Tandem: {name} of the whole cluster.", "gauge")
        gauge.add_sample(gauge.name, labels, value)
        yield gauge
    for family in families:
        for name in _COUNTERS.get(family.name, ()):
            counter = Metric(name, family.documentation, "counter")
            for sample in family.samples:
                if sample.name == f"{family.name}_total":
                    counter.add_sample(f"{name}_total", labels, sample.value)
            yield counter
        if family.name in _HISTOGRAMS:
            name, bounds = _HISTOGRAMS[family.name]
            histogram = Metric(name, family.documentation, "histogram")
            for sample in family.samples:
                bound = sample.labels.get("le")
                if (bound is None or float(bound) in (*bounds, float("inf"))) and not sample.name.endswith("_created"):
                    histogram.add_sample(
                        name + sample.name.removeprefix(family.name), {**labels, **sample.labels}, sample.value
                    )
            yield histogram


class _Made:
    """A collector of metrics that exist already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
