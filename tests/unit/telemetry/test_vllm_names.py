"""Tandem's metrics under vLLM's names, and the ORCA load report."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.protocol.messages.membership import WorkerLoad
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.telemetry.vllm_names import (
    E2E_BOUNDS_S,
    ITL_BOUNDS_S,
    TTFT_BOUNDS_S,
    adapter_gauge,
    cache_gauge,
    load_gauges,
    orca_header,
    vllm_text,
)

LABELS = {"model_name": "m", "engine": "0"}
LOADS = [
    WorkerLoad(num_running=2, num_waiting=1, num_blocks=60, num_free_blocks=40),
    WorkerLoad(num_running=3, num_waiting=0, num_blocks=40, num_free_blocks=35),
]


def test_names_types_labels_and_bounds_are_vllms() -> None:
    metrics = ProxyMetrics()
    for seconds in (0.003, 0.3, 3.0):
        metrics.ttft.observe(seconds)
        metrics.e2e.observe(seconds)
    metrics.prompt_tokens.inc(10)
    metrics.cached_prompt_tokens.inc(4)
    text = vllm_text(metrics.families(), load_gauges(LOADS), "m").decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {(sample.name, sample.labels.get("le")): sample.value for f in families.values() for sample in f.samples}
    assert values["vllm:num_requests_running", None] == 5
    assert values["vllm:num_requests_waiting", None] == 1
    assert values["vllm:kv_cache_usage_perc", None] == pytest.approx(0.25)
    assert values["vllm:prefix_cache_queries_total", None] == 10
    assert values["vllm:prefix_cache_hits_total", None] == 4
    assert values["vllm:time_to_first_token_seconds_bucket", "0.005"] == 1
    assert values["vllm:e2e_request_latency_seconds_bucket", "0.3"] == 2
    assert values["vllm:e2e_request_latency_seconds_count", None] == 3
    for name, bounds in (
        ("time_to_first_token_seconds", TTFT_BOUNDS_S),
        ("inter_token_latency_seconds", ITL_BOUNDS_S),
        ("e2e_request_latency_seconds", E2E_BOUNDS_S),
    ):
        family = families[f"vllm:{name}"]
        assert family.type == "histogram"
        shown = [float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels]
        assert shown == [*bounds, float("inf")]
    assert families["vllm:kv_cache_usage_perc"].type == "gauge"
    for family in families.values():
        for sample in family.samples:
            assert {name: sample.labels[name] for name in LABELS} == LABELS


def test_an_endpoint_picker_learns_of_adapters_and_of_the_cache() -> None:
    text = vllm_text([], {}, "m", [adapter_gauge(["a", "b"]), cache_gauge(16, 100)]).decode()
    adapters, cache = text_string_to_metric_families(text)
    [sample] = adapters.samples
    assert (adapters.name, adapters.type) == ("vllm:lora_requests_info", "gauge")
    assert sample.labels == {"max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": ""}
    assert sample.value > 1e9  # pickers use the newest
    assert cache.samples[0].labels == {"engine": "0", "block_size": "16", "num_gpu_blocks": "100"}


def test_the_load_report_has_the_format_that_was_asked_for() -> None:
    gauges = load_gauges(LOADS)
    text = orca_header("TEXT", gauges)["endpoint-load-metrics"]
    assert text == "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=1.0"
    report = orca_header("json", gauges)["endpoint-load-metrics"]
    assert json.loads(report.removeprefix("JSON ")) == {
        "named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 1.0}
    }
    assert orca_header("BIN", gauges) == {}
    assert load_gauges([])["kv_cache_usage_perc"] == 0
