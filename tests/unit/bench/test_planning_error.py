"""The measurement of how far planned latencies are from real ones."""

from __future__ import annotations

import json
from pathlib import Path

from bench.never_worse import ChatTurn, Conversation
from bench.planning import aims, compared, lines_of
from bench.support.latency import RequestTrace
from tandem.deploy.planning.player import TraceRequest
from tandem.deploy.planning.trace import read_trace


def test_what_was_sent_is_the_trace_that_is_simulated(tmp_path: Path) -> None:
    conversations = [Conversation(0.0, (ChatTurn(100, 5),) * 2), Conversation(1.0, (ChatTurn(70, 9),))]
    sent = [(50.0, 100, 5), (53.0, 205, 5), (51.0, 70, 9)]
    traces = [RequestTrace(at, num_prompt_tokens=prompt, num_output_tokens=output) for at, prompt, output in sent]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines_of(conversations, traces)))
    first, alone, turn = read_trace(file, 4096)
    assert (first, alone) == (TraceRequest(0.0, 100, 5), TraceRequest(1.0, 70, 9))
    assert turn == TraceRequest(3.0, 205, 5, follows=0)


def test_six_of_eight_cases_must_be_right() -> None:
    rows = [
        {"layout": "elastic-2", "case": str(n), "error simulated": 0.1 if n < 6 else 0.5, "error of another load": 0.2}
        for n in range(8)
    ]
    assert [aim.met for aim in aims(rows)] == [True, False] + [True] * 6 + [False] * 2
    assert not aims([*rows[1:], rows[-1]])[0].met


def test_errors_are_those_of_means_of_the_repeats() -> None:
    real = [
        {"ttft_ms": 90.0, "tpot_ms": 10.0, "output_tokens_per_s": 50.0},
        {"ttft_ms": 110.0, "tpot_ms": 10.0, "output_tokens_per_s": 50.0},
    ]
    late = {"ttft_ms": 120.0, "tpot_ms": 9.0, "output_tokens_per_s": 50.0}
    row = compared(real, {"simulated": real[::-1], "of another load": [late]})
    assert (row["ttft_ms"], row["ttft_ms of another load"], row["ttft_ms of another load, ratio"]) == (
        100.0,
        120.0,
        1.2,
    )
    assert (row["error simulated"], row["error of another load"]) == (0.0, 0.2)
