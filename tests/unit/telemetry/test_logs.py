"""Log lines cannot be forged, and the metrics of a sequence match their definitions."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.runtime.logs import LogSettings, serving, setup_logging
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.telemetry.request_log import RequestLog, RequestRecord, SequenceTimer
from tandem.telemetry.stages import PLACEMENTS, STAGES, AttemptTimes


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_message_cannot_forge_a_line(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("proxy-0")
    logging.getLogger("x").info("a client said %s", "hello\n12:00:00.000 proxy-0 E x: fire")
    logging.getLogger("x").debug("not shown")
    [line] = capsys.readouterr().err.splitlines()
    assert " proxy-0 I x: a client said hello\\n12:00" in line


def test_metrics_of_one_sequence() -> None:
    metrics = ProxyMetrics()
    timer = SequenceTimer(metrics, 10.0, [AttemptTimes(dispatched_at=10.25, first_token_at=10.5)])
    for now in (10.5, 10.6, 10.9):
        timer.on_tokens(now, 1)
        timer.on_text(now + 0.0625)
    timer.on_finished(11.0)
    metrics.per_token.flush()

    def value(name: str) -> float:
        return float(metrics.registry.get_sample_value(f"tandem_{name}") or 0)

    assert value("time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert value("inter_token_latency_seconds_sum") == pytest.approx(0.4)
    assert value("request_time_per_output_token_seconds_sum") == pytest.approx(0.2)
    assert value("e2e_request_latency_seconds_sum") == pytest.approx(1.0)
    assert value("generation_tokens_total") == 3
    stages = {name: value(f"request_{name}_time_seconds_sum") for name in STAGES}
    assert sum(stages.values()) == pytest.approx(1.0)
    assert stages["tokenize"] == pytest.approx(0.25)
    assert stages["detokenize"] == pytest.approx(3 * 0.0625)
    assert all(value(f"request_{name}_time_seconds_count") == 1 for name in STAGES)


def test_predictions_are_compared_with_what_was_measured() -> None:
    metrics = ProxyMetrics()

    def value(name: str, latency: str) -> float:
        return metrics.registry.get_sample_value(f"tandem_{name}_total", {"latency": latency}) or 0.0

    def play(attempts: list[AttemptTimes], *arrivals: float) -> None:
        timer = SequenceTimer(metrics, 10.0, attempts)
        for now in arrivals:
            timer.on_tokens(now, 1)
        timer.on_finished(arrivals[-1])

    too_soon = AttemptTimes(10.25, predicted_ttft_s=0.25, predicted_itl_s=0.25, placement="two")
    play([too_soon], 10.75, 11.25, 11.75)
    too_late = AttemptTimes(10.5, predicted_ttft_s=1.0, predicted_itl_s=0.5, placement="same")
    play([too_late], 11.25, 11.5)
    assert [value(name, "ttft") for name in ("predictions", "predicted_seconds", "measured_seconds")] == [2, 1.25, 1.25]
    assert value("prediction_error_seconds", "ttft") == 0.5, "errors of opposite signs do not cancel out"
    assert [value(name, "itl") for name in ("predictions", "predicted_seconds", "measured_seconds")] == [2, 0.75, 0.75]
    assert value("prediction_error_seconds", "itl") == 0.5

    unknown_itl = AttemptTimes(10.5, predicted_ttft_s=1.0, placement="deflected")
    play([unknown_itl], 11.5, 11.75)
    migrated = [AttemptTimes(10.5, predicted_itl_s=1.0, lost_at=11.0), AttemptTimes(11.0, predicted_ttft_s=1.0)]
    play(migrated, 12.0, 13.0)
    assert value("predictions", "ttft") == 4 and value("predictions", "itl") == 2
    placements = {
        where: metrics.registry.get_sample_value("tandem_placements_total", {"placement": where})
        for where in PLACEMENTS
    }
    assert placements == {"same": 1, "two": 2, "deflected": 1, "prefill_only": 0}


def test_gauges_of_workers_follow_their_roles() -> None:
    metrics = ProxyMetrics()

    def roles_of(worker_id: str) -> dict[str, float]:
        return {
            sample.labels["role"]: sample.value
            for metric in metrics.worker_role.collect()
            for sample in metric.samples
            if sample.labels["worker"] == worker_id
        }

    def num_of(role: str) -> float | None:
        return metrics.registry.get_sample_value("tandem_workers", {"role": role})

    metrics.on_workers([("worker-0", "any"), ("decode-0", "decode")])
    assert (num_of("any"), num_of("decode"), num_of("prefill")) == (1, 1, None)
    metrics.on_workers([("worker-0", "decode"), ("decode-0", "decode")])
    assert (num_of("any"), num_of("decode")) == (0, 2)
    assert roles_of("worker-0") == {"any": 0, "decode": 1}
    metrics.on_workers([("worker-0", "any")])
    assert (num_of("any"), num_of("decode")) == (1, 0)
    assert roles_of("worker-0") == {"any": 1, "decode": 0} and roles_of("decode-0") == {"decode": 0}


def test_json_lines_contain_the_request_id(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    def serve() -> None:
        serving("r-1")
        logging.getLogger("x").warning("it is %s\nlate", "very", extra={"fields": {"after_s": 3}})

    setup_logging("proxy-0", LogSettings("info", "json"))
    copy_context().run(serve)
    logging.getLogger("x").info("nobody's")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first.pop("unix_s") > 0
    assert first == {
        "process": "proxy-0", "level": "warning", "logger": "x", "message": "it is very\nlate", "request_id": "r-1",
        "after_s": 3,
    }  # fmt: skip
    assert "request_id" not in second
    setup_logging("proxy-0", LogSettings("info", "text"))
    copy_context().run(serve)
    assert capsys.readouterr().err.rstrip().endswith("W x: it is very\\nlate request_id=r-1 after_s=3")


def test_a_request_ends_with_one_line_and_a_timeline(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("proxy-0", LogSettings("info", "json"))
    metrics, ended = ProxyMetrics(), []
    requests = RequestLog(ended.append)
    record = requests.begin("given", "chat")
    at = record.arrived_at = record.arrived_at - 10
    requests.rename(record, "named")
    attempt = AttemptTimes(at + 1, "a-0", "prefill-0", "decode-0", predicted_ttft_s=2.0)
    attempt.on_first_token(at + 4, queue_s=1, prefill_s=1.5)
    timer = SequenceTimer(metrics, at, [attempt])
    record.sequences.append(timer)
    record.read_at = at + 0.5
    assert requests.find("named") is record and requests.find("given") is None
    assert record.timeline()["outcome"] == "running"
    for now in (at + 4, at + 5):
        timer.on_tokens(now, 1)
        timer.on_text(now)
    timer.on_finished(at + 5)
    requests.end(record, "stop")
    requests.end(record, "aborted")
    assert ended == [record]
    [line] = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert line["logger"] == "request" and line["request_id"] == "named" and line["outcome"] == "stop"
    assert line["ttft_ms"] == 4000 and line["queue_ms"] == 1000 and line["dispatch_ms"] == 500
    timeline = record.timeline()
    names = [event["event"] for event in timeline["events"]]
    assert names[:4] == ["arrived", "tokenized", "dispatched", "first token computed"]
    assert timeline["events"][2] == {
        "at_s": 1.0, "event": "dispatched", "sequence": 0, "attempt": "a-0", "prefill": "prefill-0",
        "decode": "decode-0", "placement": "two", "kv_shipped": True, "predicted_ttft_s": 2.0,
    }  # fmt: skip
    assert sum(timeline["stages_s"].values()) == pytest.approx(5)
    assert sum(timeline["stages_s"][name] for name in list(STAGES)[:5]) == pytest.approx(4)


def test_only_recent_timelines_are_kept() -> None:
    requests = RequestLog(num_kept=3)
    records = [requests.begin(f"r{number}", "chat") for number in range(5)]
    assert requests.find("r1") is None and requests.find("r2") is records[2]
    again = requests.begin("r2", "chat")
    assert requests.find("r2") is again and requests.find("r3") is records[3]


def test_refused_requests_do_not_displace_timelines(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("proxy-0", LogSettings("info", "json"))
    requests = RequestLog(num_kept=3)
    kept = [requests.begin(f"kept-{number}", "chat") for number in range(2)]
    refused: list[RequestRecord] = []
    for number in range(500):
        refused.append(requests.begin(f"refused-{number}", "chat"))
        requests.end(refused[-1], "overloaded", is_refused=True)
    assert [requests.find(record.request_id) for record in kept] == kept
    assert requests.find("refused-499") is refused[499] and requests.find("refused-299") is None
    logged = [json.loads(line)["request_id"] for line in capsys.readouterr().err.splitlines()]
    assert logged == [record.request_id for record in refused], "refused requests are logged too"


@given(st.lists(st.one_of(st.floats(0, 20), st.sampled_from([0.001, 0.0025, 10.0])), min_size=1))
def test_a_tally_equals_single_observations(itls_s: list[float]) -> None:
    tallied, single = ProxyMetrics(), ProxyMetrics()
    for number, itl_s in enumerate(itls_s):
        tallied.per_token.on_tokens(number * 0.3, 1, itl_s)  # flushed in between, too
        single.per_token.itl.observe(itl_s)
        single.generation_tokens.inc()
    tallied.per_token.flush()

    def samples(metrics: ProxyMetrics) -> dict[tuple[str, str], Any]:
        families = [metrics.per_token.itl, metrics.generation_tokens]
        found = [s for family in families for metric in family.collect() for s in metric.samples]
        return {(s.name, str(s.labels)): pytest.approx(s.value) for s in found if not s.name.endswith("_created")}

    assert samples(tallied) == samples(single)
