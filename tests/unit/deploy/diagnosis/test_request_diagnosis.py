"""`tandem doctor REQUEST_ID` says where the time of one request went, and what differs from the medians."""

from __future__ import annotations

from typing import Any

from tandem.deploy.commands.doctor import request_text
from tandem.deploy.diagnosis.request_diagnosis import diagnose_request
from tandem.deploy.operations.serving_rates import RateSample
from tandem.protocol.messages.membership import StatusReport
from tandem.proxy.admission.admission import Admission
from tandem.proxy.control import serving_figures
from tandem.proxy.proxy_settings import AdmissionSettings
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.telemetry.request_log import RequestRecord, SequenceTimer
from tandem.telemetry.stages import AttemptTimes


def attempt(at: float, queue_s: float, transfer_s: float = 0.004, predicted_ttft_s: float = 0.05) -> AttemptTimes:
    """One that computes for 40 ms, and decodes after the transfer."""
    times = AttemptTimes(at, prefill="prefill-0", decode="decode-1", predicted_ttft_s=predicted_ttft_s)
    times.on_first_token(at + queue_s + 0.041, queue_s, 0.04)
    times.on_began(at + queue_s + 0.041 + transfer_s + 0.01, 0.0, 0.01)
    return times


def finished(metrics: ProxyMetrics, attempts: list[AttemptTimes], num_tokens: int = 11) -> RequestRecord:
    """A request that arrived at 1.0 and decoded for 10 ms a token."""
    record = RequestRecord("id-1", "chat", arrived_at=1.0, num_prompt_tokens=64, num_completion_tokens=num_tokens)
    timer = SequenceTimer(metrics, 1.0, attempts)
    record.sequences.append(timer)
    first_at = next(each.first_token_at for each in attempts if each.first_token_at is not None)
    timer.on_tokens(first_at, 1)
    began_at = attempts[-1].began_at
    assert began_at is not None
    for number in range(num_tokens - 1):
        timer.on_tokens(began_at + 0.01 * number, 1)
    timer.on_finished(began_at + 0.01 * (num_tokens - 2))
    record.end("length")
    return record


def diagnosed(attempts: list[AttemptTimes]) -> Any:
    """Returns the diagnosis of a request after fifty usual ones."""
    metrics = ProxyMetrics()
    for _ in range(50):
        finished(metrics, [attempt(1.001, 0.002)])
    timeline = finished(metrics, attempts).timeline()
    figures = serving_figures(metrics, Admission(AdmissionSettings(), lambda: 0.0))
    return diagnose_request(timeline, RateSample(0.0, [StatusReport("p", "m", True, 0, [], figures)]))


def test_a_usual_request_is_taken_apart_and_not_unusual() -> None:
    diagnosis = diagnosed([attempt(1.001, 0.002)])
    text = request_text(diagnosis, 100)
    assert "Request id-1 (chat): 64 prompt tokens, 0 of them cached; 11 tokens generated; ended with length." in text
    assert "prefill-0 computed its prompt and decode-1 decoded." in " ".join(text.split())
    assert sum(stage.share for stage in diagnosis.first) == 1 and round(diagnosis.ttft_s, 3) == 0.044
    assert "for 10 tokens" in text and "Nothing about it was unusual." in text


def test_what_took_longer_than_the_median_is_named() -> None:
    diagnosis = diagnosed([attempt(1.001, 0.5, transfer_s=0.2, predicted_ttft_s=0.1)])
    assert [each.kind for each in diagnosis.unusual] == ["queue", "transfer", "prediction"]
    queue, transfer, prediction = (each.text for each in diagnosis.unusual)
    assert queue.startswith("Waiting for prefill took 500 ms, ") and "times the median of " in queue
    assert transfer.startswith("Shipping KV after the first token took 200 ms")
    assert prediction == "The router predicted a TTFT of 100 ms from the dispatch on; it was 541 ms."


def test_a_lost_attempt_is_named() -> None:
    lost = AttemptTimes(1.001, prefill="prefill-0", decode="decode-0", lost_at=1.4)
    diagnosis = diagnosed([lost, attempt(1.41, 0.002)])
    text = " ".join(each.text for each in diagnosis.unusual)
    assert "dispatched 2 times (prefill-0, decode-0 -> prefill-0, decode-1)" in text
    assert "Lost workers, until another one continued took" in text


def test_a_request_that_runs_shows_what_has_happened() -> None:
    metrics = ProxyMetrics()
    record = RequestRecord("id-2", "completion", arrived_at=1.0, num_prompt_tokens=64)
    record.sequences.append(SequenceTimer(metrics, 1.0, [AttemptTimes(1.002, prefill="prefill-0", decode="decode-1")]))
    figures = serving_figures(metrics, Admission(AdmissionSettings(), lambda: 0.0))
    sample = RateSample(0.0, [StatusReport("p", "m", True, 0, [], figures)])
    text = request_text(diagnose_request(record.timeline(), sample), 100)
    assert "it still runs" in text and "  2.0 ms: dispatched to prefill-0 and decode-1" in text
    assert "Nothing about it" not in text
