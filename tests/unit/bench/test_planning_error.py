"""The measurement of how far planned latencies are from real ones."""

from __future__ import annotations

import json
from pathlib import Path

from bench.never_worse import ChatTurn, Conversation
from bench.planning import aims, lines_of
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
    rows = [{"layout": "elastic-2", "case": str(n), "error": 0.1 if n < 6 else 0.5} for n in range(8)]
    assert [aim.met for aim in aims(rows)] == [True] * 7 + [False] * 2
    assert not aims([*rows[1:], rows[-1]])[0].met
