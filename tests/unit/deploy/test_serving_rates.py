"""`tandem status` computes rates from two samples of all proxies and prints tables that fit a terminal."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from tandem.deploy.commands.status import status_tables
from tandem.deploy.operations.serving_rates import RateSample, rates
from tandem.protocol.messages.membership import (
    LatencyBuckets,
    PairStatus,
    PairTraffic,
    PredictionFigures,
    Role,
    ServingFigures,
    StatusReport,
    WorkerInfo,
    WorkerLoad,
    WorkerReport,
)
from tandem.proxy.admission.admission import Admission
from tandem.proxy.control import serving_figures
from tandem.proxy.proxy_settings import AdmissionSettings
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.telemetry.request_log import SequenceTimer
from tandem.telemetry.stages import STAGES, AttemptTimes


def figures(fast: int, slow: int, tokens: int) -> ServingFigures:
    """fast: first tokens within 0.1 s; slow: within a second. All were predicted 0.1 s too soon."""
    num = fast + slow
    ttft = LatencyBuckets([0.1, 1.0], [fast, slow, 0])
    none = LatencyBuckets([0.1, 1.0], [0, 0, 0])
    predictions = {"ttft": PredictionFigures(num, 0.2 * num, 0.3 * num, 0.1 * num)}
    placements = {"same": fast, "two": slow, "deflected": 0, "prefill_only": 0}
    stages_s = {"prefill": 0.5 * num}
    return ServingFigures(3, 10 * tokens, tokens, num, ttft, none, none, stages_s, 0, predictions, placements)


def report(proxy_id: str, serving: ServingFigures, num_bytes: int = 0, seconds: float = 0.0) -> StatusReport:
    traffic = [PairTraffic("decode-0", num_bytes, 1, seconds)]
    prefill = WorkerInfo("prefill-0", "p", "prefill", "ipc://p", 11)
    decode = WorkerInfo("decode-0", "d", "decode", "ipc://d", 12)
    workers = [
        WorkerReport(
            prefill, WorkerLoad(num_blocks=8, traffic=traffic), [PairStatus("decode-0", "d", "ready", "ipc")], 0.1
        ),
        WorkerReport(decode, WorkerLoad(num_blocks=8, num_free_blocks=6), [], 0.2),
    ]
    return StatusReport(proxy_id, "m", True, 2, workers, serving)


def test_rates_add_up_over_all_proxies() -> None:
    then = RateSample(100.0, [report("a", figures(10, 0, 1000), 1_000_000, 1.0), report("b", figures(5, 5, 50))])
    now = RateSample(110.0, [report("a", figures(10, 4, 1500), 5_000_000, 3.0), report("b", figures(9, 5, 150))])
    result = rates(now, then)
    assert (result.num_waiting, result.num_finished) == (6, 8)
    assert result.ttft_s == pytest.approx([0.1, 0.82, 0.982])  # four within each bucket
    assert result.itl_s == [None, None, None]
    assert result.output_tokens_per_s == 60 and result.prompt_tokens_per_s == 600 and result.finished_per_s == 0.8
    assert result.stages_s == {"prefill": pytest.approx(0.5)}
    assert result.bandwidth == {("prefill-0", "decode-0"): pytest.approx(2e6)}
    [(latency, means)] = result.predictions.items()
    assert latency == "ttft"
    assert (means.predicted_s, means.measured_s, means.error_s) == pytest.approx((0.2, 0.3, 0.1))
    assert result.placements == {"same": 4, "two": 4, "deflected": 0, "prefill_only": 0}


def test_figures_since_the_start_have_percentiles_but_no_rates() -> None:
    restarted = RateSample(110.0, [report("c", figures(4, 0, 100))])  # unknown to the sample before
    assert rates(restarted, RateSample(100.0, [report("a", figures(9, 9, 900))])).num_finished == 4
    result = rates(restarted, None)
    assert result.output_tokens_per_s is None and result.ttft_s[0] == pytest.approx(0.05)


def test_serving_figures_equal_the_metrics() -> None:
    metrics = ProxyMetrics()
    attempt = AttemptTimes(
        dispatched_at=10.25, first_token_at=10.5, placement="same", predicted_ttft_s=0.5, predicted_itl_s=0.125
    )
    timer = SequenceTimer(metrics, 10.0, [attempt])
    for now in (10.5, 10.6, 10.9):
        timer.on_tokens(now, 1)
        timer.on_text(now)
    timer.on_finished(11.0)
    for reason in ("slo", "queue_full", "client_limit"):
        metrics.rejected.labels(reason).inc()
    reported = serving_figures(metrics, Admission(AdmissionSettings(8), lambda: 0.0))
    assert (reported.num_output_tokens, reported.num_finished, reported.num_waiting) == (3, 1, 0)
    assert [sum(each.counts) for each in (reported.ttft, reported.itl, reported.e2e)] == [1, 2, 1]
    assert len(reported.ttft.counts) == len(reported.ttft.bounds_s) + 1
    assert reported.num_refused == 2  # the client's own limit does not count
    assert reported.predictions["ttft"] == PredictionFigures(1, 0.5, 0.25, 0.25)
    assert msgspec.structs.astuple(reported.predictions["itl"]) == pytest.approx((1, 0.125, 0.2, 0.075))
    assert reported.placements == {"same": 1, "two": 0, "deflected": 0, "prefill_only": 0}
    assert list(reported.stages_s) == list(STAGES) and sum(reported.stages_s.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("is_recent", [True, False])
def test_the_tables_fit_80_columns(is_recent: bool) -> None:
    then = RateSample(100.0, [report("a", figures(10, 0, 1000))]) if is_recent else None
    console = Console(width=80, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(status_tables(RateSample(110.0, [report("a", figures(12, 3, 1500), 4_000_000, 2.0)]), then, 0))
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= 80
    for words in ("m: ready", "TTFT", "prefill-0", "decode-0", "25%", "waiting for a first token", "prefill 500"):
        assert words in shown, words
    assert "TTFT from dispatch     200.0    300.0 100.0" in shown
    assert ("ran: 2 on one worker, 3 on two workers (KV handed over)" in shown) is is_recent
    assert ("50.0 output tokens/s" in shown) is is_recent


def test_the_table_of_workers_shows_which_does_not_answer_a_proxy() -> None:
    here = report("a", figures(1, 0, 10))
    first, *others = here.workers
    there = msgspec.structs.replace(here, workers=[msgspec.structs.replace(first, unanswered_s=9.0), *others])
    console = Console(width=80, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(status_tables(RateSample(1.0, [here, there]), None, 0))
    shown = captured.get()
    assert shown.count("no answer") == 1 and f"{first.worker.worker_id} no answer" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_status_says_whether_answers_are_exact_as_the_proxy_words_it() -> None:
    console = Console(width=200, record=True, force_terminal=False)
    for exactness in ("yes (numerics 3f2a)", "no: a reason [with brackets] (decode-0)", ""):
        reported = msgspec.structs.replace(report("a", figures(1, 0, 10)), exactness=exactness)
        with console.capture() as captured:
            console.print(status_tables(RateSample(1.0, [reported]), None, 0))
        lines = [line for line in captured.get().splitlines() if line.startswith("exact: ")]
        assert lines == ([f"exact: {exactness}"] if exactness else [])


def test_the_table_of_workers_shows_current_roles_and_flips() -> None:
    roles: list[tuple[Role, int]] = [("decode", 13), ("any", 0)]
    elastic = [
        WorkerReport(
            WorkerInfo(f"worker-{number}", f"e{number}", role, "ipc://w", 4_000_000 + number),
            WorkerLoad(num_blocks=4096, num_free_blocks=1024, num_role_changes=flips),
            [PairStatus(f"worker-{1 - number}", f"e{1 - number}", "ready", "ipc")],
            0.1,
        )
        for number, (role, flips) in enumerate(roles)
    ]
    console = Console(width=80, record=True, force_terminal=False)
    with console.capture() as captured:
        sample = RateSample(1.0, [StatusReport("a", "m", True, 0, elastic, figures(1, 0, 10))])
        console.print(status_tables(sample, None, 0))
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= 80
    assert [line.split()[:3] for line in shown.splitlines() if line.startswith("worker-") and "%" in line] == [
        ["worker-1", "any", "4000001"],
        ["worker-0", "decode", "(13)"],
    ]


def test_the_status_shows_the_length_that_all_workers_take_and_their_blocks() -> None:
    whole = report("a", figures(1, 0, 10))
    prefill, decode = whole.workers

    def shown(prefill_len: int, decode_len: int, decode_block: int) -> str:
        workers = [
            msgspec.structs.replace(prefill, max_model_len=prefill_len, block_size=64),
            msgspec.structs.replace(decode, max_model_len=decode_len, block_size=decode_block),
        ]
        sample = RateSample(0.0, [msgspec.structs.replace(whole, workers=workers)])
        console = Console(width=80)
        with console.capture() as capture:
            console.print(status_tables(sample, None, 0))
        return capture.get()

    assert "sequences of up to 4096 tokens, KV blocks of 64 tokens" in shown(4096, 4096, 64)
    assert "sequences of up to 2048 tokens (limit of decode-0), KV blocks of 16 or 64" in shown(4096, 2048, 16)
    assert "weights" not in shown(4096, 4096, 64) and "engine" not in shown(4096, 4096, 64)
    prefill, decode = (msgspec.structs.replace(each, engine="tandem 0.1.0") for each in (prefill, decode))
    assert "KV blocks of 64 tokens, engine: tandem 0.1.0" in " ".join(shown(4096, 4096, 64).split())
    decode = msgspec.structs.replace(decode, engine="vllm 0.32.0")
    assert "engine: tandem 0.1.0 or vllm 0.32.0" in " ".join(shown(4096, 4096, 64).split())
    prefill = msgspec.structs.replace(prefill, quantization="gptq int4")
    assert "KV blocks of 64 tokens, weights: gptq int4 or no quantisation" in shown(4096, 4096, 64).replace("\n", " ")
