"""What vLLM's client read, read again; and what of two clients is compared."""

from __future__ import annotations

import json

import pytest

from bench.latency import RequestTrace
from bench.load_agreement import KeptStream, aims, beside_each_other, row, same_streams


def event(**fields: object) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def test_a_kept_stream_is_read_as_it_came() -> None:
    """Events cut anywhere, several in one piece, a chat's role and an end without text, and the usage at the end."""
    first, second = event(choices=[{"delta": {"role": "assistant"}}]), event(choices=[{"delta": {"content": "a"}}])
    end = event(choices=[{"delta": {}, "finish_reason": "stop"}])
    usage = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2})
    pieces = [(1.0, first[:9]), (2.0, first[9:] + second[:5]), (3.0, second[5:] + end + usage)]
    trace = KeptStream(0.5, 200, [*pieces, (4.0, "data: [DONE]\n\n")]).trace()
    assert trace.chunk_times == [2.0, 3.0, 3.0]
    assert (trace.ttft_s, trace.num_prompt_tokens, trace.num_output_tokens) == (1.5, 7, 2)
    assert trace.tpot_s == pytest.approx(1.0)


def told_by_vllm(ttft_ms: float) -> dict[str, float]:
    told = {"completed": 1, "total_output_tokens": 3, "request_throughput": 0.5, "output_throughput": 1.5}
    told["request_goodput"] = 0.0
    for kind, value in (("ttft", ttft_ms), ("tpot", 500.0), ("itl", 500.0), ("e2el", 2000.0)):
        told |= {f"{statistic}_{kind}_ms": value for statistic in ("mean", "median", "p99")}
    return told


def test_a_figure_that_is_apart_is_the_aims_that_is_missed() -> None:
    traces = [RequestTrace(0.0, [1.0, 1.5, 2.0], 4, 3)]
    rows = same_streams(told_by_vllm(1000.0), traces)
    assert len(rows) == 17 and all(each["apart"] == 0 for each in rows)
    (met,) = aims(rows)
    assert met.met
    (missed,) = aims(same_streams(told_by_vllm(900.0), traces))
    assert not missed.met and "TTFT" in missed.name and missed.value == pytest.approx(1 / 9)


def test_two_clients_are_compared_where_both_were_at_it() -> None:
    def traces(sent: range, ttft_s: float) -> list[RequestTrace]:
        return [RequestTrace(at, [at + ttft_s, at + ttft_s + 1], 4, 2) for at in sent]

    slow_start = traces(range(10), 5.0)  # before the other came
    rows = beside_each_other(slow_start + traces(range(10, 20), 1.0), traces(range(10, 30), 2.0))
    assert {each["figure"]: each["vllm"] for each in rows}["mean TTFT"] == pytest.approx(1000.0)
    assert {each["figure"]: each["apart"] for each in rows}["mean TTFT"] == pytest.approx(1.0)
    assert row("", "x", 0.0, 0.0)["apart"] == 0.0 and row("", "x", 0.0, 1.0)["apart"] == 1.0
