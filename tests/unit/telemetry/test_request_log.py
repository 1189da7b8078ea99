"""The timelines that a proxy keeps need bounded memory, whatever the requests were."""

from __future__ import annotations

import tracemalloc

from tandem.telemetry import request_log
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.telemetry.request_log import (
    MAX_SHOWN_ATTEMPTS,
    MAX_SHOWN_SEQUENCES,
    RequestLog,
    RequestRecord,
    SequenceTimer,
)
from tandem.telemetry.stages import AttemptTimes

METRICS = ProxyMetrics()


def ended(requests: RequestLog, number: int, num_sequences: int, num_attempts: int) -> RequestRecord:
    """Returns a record of a request whose sequences were all interrupted many times."""
    record = requests.begin(f"request-{number}-{'x' * 100}", "completion")
    for index in range(num_sequences):
        attempts = []
        for attempt in range(num_attempts):
            moment = number + attempt + 0.1
            attempts.append(AttemptTimes(moment, f"{number}.{index}.{attempt}", "prefill-0", "decode-0"))
            attempts[-1].on_first_token(moment + 0.2, 0.0125, 0.025)
            attempts[-1].on_began(moment + 0.3, 0.0125, 0.025)
            attempts[-1].lost_at = moment + 0.4
        timer = SequenceTimer(METRICS, float(number), attempts)
        record.sequences.append(timer)
        timer.on_tokens(number + 1.5, 1)
        timer.on_finished(number + 2.5)
    requests.end(record, "stop")
    return record


def test_the_memory_of_kept_records_is_bounded() -> None:
    requests = RequestLog()
    tracemalloc.start()
    try:
        for number in range(20):
            ended(requests, number, num_sequences=20, num_attempts=20)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown / 20 * request_log.NUM_KEPT < 64 << 20


def test_an_ended_request_keeps_figures_of_all_its_sequences() -> None:
    requests = RequestLog()
    record = ended(requests, 7, num_sequences=100, num_attempts=30)
    assert len(record.sequences) == MAX_SHOWN_SEQUENCES
    timeline = record.timeline()
    assert (timeline["sequences"], timeline["ttft_ms"] is not None) == (100, True)
    assert len(timeline["events"]) == record.num_events()
    attempts = [
        each["attempt"] for each in timeline["events"] if each["event"] == "dispatched" and not each["sequence"]
    ]
    assert len(attempts) == MAX_SHOWN_ATTEMPTS
    assert attempts[0] == "7.0.0" and attempts[-1] == "7.0.29"


def test_small_requests_are_kept_by_their_number() -> None:
    requests = RequestLog(num_kept=3)
    for number in range(5):
        ended(requests, number, 1, 1)
    assert [requests.find(f"request-{number}-{'x' * 100}") is not None for number in range(5)] == [False] * 2 + [
        True
    ] * 3
