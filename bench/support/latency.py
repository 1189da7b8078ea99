"""TTFT, TPOT, ITL and E2E of streamed requests, as `vllm bench serve` (0.32) defines them.

TTFT: from sending to the first chunk with a choice (a chat's role chunk counts). TPOT: from that chunk to the last one,
divided by the output tokens less one. ITL: gaps between chunks. E2E: from sending to the last chunk.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from tests.support.sse import event_of


class RequestTrace(msgspec.Struct):
    """Times of one request in seconds of one clock; `num_output_tokens` is the server's count."""

    sent_at: float
    chunk_times: list[float] = []
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.chunk_times[0] - self.sent_at

    @property
    def e2e_s(self) -> float:
        return self.chunk_times[-1] - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first, or None for outputs of one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between chunks, as the client received them."""
        return [b - a for a, b in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


def read_events(lines: Iterable[bytes], trace: RequestTrace, clock: Callable[[], float] = time.perf_counter) -> None:
    """Reads server-sent events into `trace` up to the end of the stream or an error event.

    Every event with a choice counts as a chunk, also one without text, as in vLLM's client.
    """
    for line in lines:
        now = clock()
        if (event := event_of(line)) is None:
            continue
        if "error" in event:
            trace.error = f"stream error {event['error'].get('code')}"
            return
        usage = event.get("usage")
        if usage:
            trace.num_prompt_tokens = usage["prompt_tokens"]
            trace.num_output_tokens = usage["completion_tokens"]
        if event.get("choices"):
            trace.chunk_times.append(now)


class Distribution(msgspec.Struct, frozen=True):
    """Summary of latencies in milliseconds."""

    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of_seconds(cls, values: Sequence[float]) -> Distribution | None:
        if not values:
            return None
        ordered = sorted(1000 * value for value in values)
        return cls(sum(ordered) / len(ordered), percentile(ordered, 50), percentile(ordered, 99), ordered[-1])


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Interpolates linearly between neighbours, as numpy does by default. `ordered` must not be empty."""
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


class LoadFigures(msgspec.Struct, frozen=True):
    """Summary of one load run. Rates refer to the time from the first request sent to the last chunk received."""

    num_requests: int
    num_completed: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None


def summarise(traces: Sequence[RequestTrace]) -> LoadFigures:
    """Counts failed requests and those without output under `errors`, and excludes them from all other figures."""
    good = [trace for trace in traces if trace.error is None and trace.chunk_times]
    errors = Counter(trace.error or "no output" for trace in traces if trace.error or not trace.chunk_times)
    ends = [trace.chunk_times[-1] for trace in good]
    duration = max(ends) - min(trace.sent_at for trace in traces) if ends else 0.0
    return LoadFigures(
        num_requests=len(traces),
        num_completed=len(good),
        errors=dict(errors),
        duration_s=duration,
        requests_per_s=len(good) / duration if duration else 0.0,
        output_tokens_per_s=sum(trace.num_output_tokens for trace in good) / duration if duration else 0.0,
        ttft_ms=Distribution.of_seconds([trace.ttft_s for trace in good]),
        tpot_ms=Distribution.of_seconds([trace.tpot_s for trace in good if trace.tpot_s is not None]),
        itl_ms=Distribution.of_seconds([gap for trace in good for gap in trace.itl_s]),
        e2e_ms=Distribution.of_seconds([trace.e2e_s for trace in good]),
    )


class SLO(msgspec.Struct, frozen=True):
    """Latency limits in seconds; 0 means no limit."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    e2e_s: float = 0.0

    def is_met(self, trace: RequestTrace) -> bool:
        """Tells whether a completed request meets every limit. An output of one token has a TPOT of 0, as in vLLM."""
        return not (
            (self.ttft_s and trace.ttft_s > self.ttft_s)
            or (self.tpot_s and (trace.tpot_s or 0.0) > self.tpot_s)
            or (self.e2e_s and trace.e2e_s > self.e2e_s)
        )

    def describe(self) -> str:
        limits = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("E2E", self.e2e_s))
        return ", ".join(f"{name} {1000 * limit:g} ms" for name, limit in limits if limit) or "no SLO"


def goodput(traces: Sequence[RequestTrace], slo: SLO) -> float:
    """Returns requests per second that meet every SLO, over the same time as the rates of `summarise`."""
    duration_s = summarise(traces).duration_s
    good = [trace for trace in traces if trace.error is None and trace.chunk_times and slo.is_met(trace)]
    return len(good) / duration_s if duration_s else 0.0


def print_figures(figures: LoadFigures) -> None:
    table = Table("", "mean ms", "p50 ms", "p99 ms", "max ms")
    for name in ("ttft", "tpot", "itl", "e2e"):
        spread: Distribution | None = getattr(figures, f"{name}_ms")
        if spread is not None:
            cells = (spread.mean, spread.p50, spread.p99, spread.max)
            table.add_row(name.upper(), *(f"{cell:.1f}" for cell in cells))
    console = Console()
    console.print(table)
    console.print(
        f"{figures.num_completed} of {figures.num_requests} requests in {figures.duration_s:.1f} s: "
        f"{figures.requests_per_s:.2f} requests/s, {figures.output_tokens_per_s:.1f} output tokens/s; "
        f"errors: {figures.errors or 'none'}"
    )
