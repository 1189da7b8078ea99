"""A worker's /metrics has its last report and histograms, and /sd lists every target for Prometheus."""

from __future__ import annotations

import httpx
import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    RegisterWorker,
    TierFigures,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.http.routes.admin import scrape_targets
from tandem.runtime.errors import ConfigError
from tandem.runtime.settings import with_values
from tandem.telemetry.worker_metrics import LOAD_FIELDS, TIER_FIELDS, WorkerMetrics
from tests.support.settings import proxy_config


def test_load_fields_match_the_workers_report() -> None:
    assert set(LOAD_FIELDS) <= set(WorkerLoad.__struct_fields__)
    assert {*TIER_FIELDS, "name", "error"} == set(TierFigures.__struct_fields__)


def test_tiers_are_a_label() -> None:
    metrics = WorkerMetrics()
    host = TierFigures("host", num_blocks=3, num_bytes=300, max_bytes=1000, num_stored=9, num_loaded=2, num_skipped=1)
    disk = TierFigures("disk", num_blocks=5, num_corrupt=1, error="No space left on device")
    metrics.on_load(WorkerLoad(num_loaded_tokens=128, loaded_tokens_per_s=5e4, tiers=[host, disk]))
    samples = {
        (sample.name.removeprefix("tandem_worker_"), sample.labels.get("tier")): sample.value
        for family in text_string_to_metric_families(generate_latest(metrics.registry).decode())
        for sample in family.samples
    }
    assert samples["prefix_cache_loaded_total", None] == 128 and samples["loaded_tokens_per_second", None] == 5e4
    shown = {name: (samples[name, "host"], samples[name, "disk"]) for name, tier in samples if tier == "host"}
    assert shown == {
        "kv_tier_blocks": (3, 5),
        "kv_tier_bytes": (300, 0),
        "kv_tier_max_bytes": (1000, 0),
        "kv_tier_stored_blocks_total": (9, 0),
        "kv_tier_loaded_blocks_total": (2, 0),
        "kv_tier_skipped_blocks_total": (1, 0),
        "kv_tier_corrupt_blocks_total": (0, 1),
        "kv_tier_failing": (0, 1),
    }


def test_the_endpoint_shows_the_last_report_and_each_pair() -> None:
    metrics = WorkerMetrics()
    address = metrics.serve("127.0.0.1")
    try:
        metrics.on_load(WorkerLoad(num_blocks=8, num_free_blocks=6, num_cached_tokens=3, num_prompt_tokens=12))
        metrics.on_load(
            WorkerLoad(num_blocks=8, num_free_blocks=2, num_cached_tokens=4, num_prompt_tokens=16, num_role_changes=2)
        )
        metrics.on_shipped(("prefill-0", "decode-1", "ipc"), 4096, 0.002)
        metrics.on_shipped(("prefill-0", "decode-1", "ipc"), 1024, 0.001)
        metrics.step.observe(0.03)
        metrics.on_refused("not_a_message")
        text = httpx.get(f"http://{address}/metrics").text
        with pytest.raises(ConfigError, match="choose another --admin-host"):
            WorkerMetrics().serve("127.0.0.1", int(address.rpartition(":")[2]))
    finally:
        metrics.close()
    samples = {
        sample.name: (sample.value, sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["tandem_worker_kv_cache_usage_perc"] == (0.75, {})
    assert samples["tandem_worker_prefix_cache_hits_total"] == (4, {})
    assert samples["tandem_worker_role_changes_total"] == (2, {})
    assert samples["tandem_worker_prefix_cache_queries_total"] == (16, {})
    pair = {"prefill_worker": "prefill-0", "decode_worker": "decode-1", "connector": "ipc"}
    assert samples["tandem_kv_transfer_bytes_total"] == (5120, pair)
    assert samples["tandem_kv_transfer_seconds_sum"] == (pytest.approx(0.003), pair)
    assert samples["tandem_worker_step_seconds_count"][0] == 1
    assert samples["tandem_worker_refusals_total"] == (1, {"reason": "not_a_message"})
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{address}/metrics")


def test_scrape_targets_list_the_port_and_every_worker() -> None:
    config = proxy_config(port=8010)
    workers = [
        WorkerInfo("prefill-0", "p", "prefill", "ipc://p", 1, metrics_address="127.0.0.1:9001"),
        WorkerInfo("decode-0", "d", "decode", "ipc://d", 2, metrics_address="127.0.0.1:9002"),
        WorkerInfo("decode-1", "e", "decode", "ipc://e", 3),
    ]
    assert msgspec.to_builtins(scrape_targets(config, "evil:1", workers)) == [
        {"targets": ["127.0.0.1:8010"], "labels": {"role": "proxy"}},
        {"targets": ["127.0.0.1:9002"], "labels": {"role": "decode", "worker": "decode-0"}},
        {"targets": ["127.0.0.1:9001"], "labels": {"role": "prefill", "worker": "prefill-0"}},
    ]
    everywhere = proxy_config(port=8010, host="0.0.0.0", ssl_certfile="cert.pem")
    [proxy, *_] = scrape_targets(everywhere, "gpu-7:8010", workers)
    assert proxy.targets == ["gpu-7:8010"] and proxy.labels == {"role": "proxy", "__scheme__": "https"}
    with_admin = with_values(everywhere, {"admin_port": 8011})
    [proxy, *_] = scrape_targets(with_admin, "gpu-7:8011", workers)
    assert proxy.targets == ["127.0.0.1:8011"] and proxy.labels == {"role": "proxy"}


def test_the_label_role_follows_a_change_of_role() -> None:
    table = WorkerTable(2.5)
    elastic, other = (
        WorkerInfo(f"worker-{number}", f"e{number}", "any", "ipc://w", number, metrics_address=f"127.0.0.1:900{number}")
        for number in range(2)
    )
    for worker in (elastic, other):
        table.on_register(0.0, RegisterWorker(PROTOCOL_VERSION, worker, 100, 500, "m", 64))

    def roles() -> dict[str, str]:
        groups = scrape_targets(proxy_config(), "", table.workers())
        return {group.labels["worker"]: group.labels["role"] for group in groups if "worker" in group.labels}

    assert table.change_role(0.0, "worker-0", "decode") == ""
    assert roles() == {"worker-0": "decode", "worker-1": "any"}
    by_another_proxy = WorkerStatus(elastic.worker_id, elastic.epoch, "prefill", WorkerLoad())
    table.on_status(2.0, by_another_proxy)
    assert roles() == {"worker-0": "prefill", "worker-1": "any"}
