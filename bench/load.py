"""Open-loop streaming load on any OpenAI-style URL, by locust as a library: Poisson arrivals, each request on its own.

Arrival times are drawn up front from the seed, so a slow server does not slow the load down; the run is bounded in
requests and in time.
"""

from __future__ import annotations

import gevent.monkey

gevent.monkey.patch_all()

import argparse  # noqa: E402
import math  # noqa: E402
import random  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from typing import Any  # noqa: E402

import gevent  # noqa: E402
import msgspec  # noqa: E402
from gevent.pool import Group  # noqa: E402
from locust.contrib.fasthttp import FastHttpUser  # noqa: E402
from locust.env import Environment  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from bench.latency import Distribution, LoadFigures, RequestTrace, read_events, summarise  # noqa: E402
from bench.report import Report, add_common_options, finish  # noqa: E402


class StreamingUser(FastHttpUser):
    """One client, with connections of its own; `host` is set when the run begins."""

    abstract = True
    connection_timeout = 30.0
    network_timeout = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tandem-demo")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--api", choices=["completions", "chat"], default="completions")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--request-rate", type=float, default=4.0, help="per second, Poisson; inf sends all at once")
    parser.add_argument("--input-len", type=int, default=256, help="prompt tokens (completions), words (chat)")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=2000, help="prompt token ids are drawn from 4 to this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-time", type=float, default=600.0, help="seconds after which the run is given up")
    add_common_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.num_prompts, options.output_len = min(options.num_prompts, 8), min(options.output_len, 16)
    figures = run_load(options)
    print_figures(figures)
    finish(Report.of("load", {"load": msgspec.to_builtins(figures)}), options.json)


def run_load(options: argparse.Namespace) -> LoadFigures:
    """Send every request at its time, wait for all, at most `max_time` seconds."""
    rng = random.Random(options.seed)
    arrivals = arrival_times(options.num_prompts, options.request_rate, rng)
    bodies = [make_body(options, rng) for _ in arrivals]
    path = "/v1/completions" if options.api == "completions" else "/v1/chat/completions"
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    return summarise(send(options.url, path, headers, arrivals, bodies, options.max_time))


def send(
    url: str,
    path: str,
    headers: dict[str, str],
    arrivals: Sequence[float],
    bodies: Sequence[dict[str, Any]],
    max_time_s: float,
) -> list[RequestTrace]:
    """A trace for each body, sent when its arrival (seconds from the start) comes; in that order."""
    environment = Environment()
    StreamingUser.host = url
    traces: list[RequestTrace] = []
    group = Group()
    start = time.perf_counter()
    for arrival, body in zip(arrivals, bodies, strict=True):
        gevent.sleep(max(0.0, start + arrival - time.perf_counter()))
        trace = RequestTrace(sent_at=time.perf_counter())
        traces.append(trace)
        group.spawn(stream_request, environment, path, body, headers, trace)
    group.join(timeout=max(0.0, start + max_time_s - time.perf_counter()))
    for trace in traces:
        if not trace.error and not trace.num_output_tokens:
            trace.error = "unfinished"
    group.kill(timeout=5)
    return traces


def arrival_times(num_requests: int, rate: float, rng: random.Random) -> list[float]:
    """Seconds from the start; gaps are exponential with mean 1/rate."""
    times, now = [], 0.0
    for _ in range(num_requests):
        times.append(now)
        now += 0.0 if math.isinf(rate) else rng.expovariate(rate)
    return times


def make_body(options: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": options.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": options.output_len,
        "ignore_eos": True,
        "temperature": 0,
    }
    token_ids = [rng.randrange(4, options.vocab) for _ in range(options.input_len)]
    if options.api == "completions":
        return {**body, "prompt": token_ids}
    return {**body, "messages": [{"role": "user", "content": " ".join(map(str, token_ids))}]}


def stream_request(
    environment: Environment,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    trace: RequestTrace,
) -> None:
    """One request over a connection of its own; fills in `trace`."""
    session = StreamingUser(environment).client
    try:
        with session.request("POST", path, json=body, headers=headers, stream=True, catch_response=True) as response:
            if response.status_code != 200:
                trace.error = f"HTTP {response.status_code}"
                response.failure(trace.error)
                return
            # Line by line from geventhttpclient: locust's own iterator waits for full kilobytes and blurs the times.
            read_events(iter(lambda: response._response.readline(b"\n"), b""), trace)
            if trace.error:
                response.failure(trace.error)
    except Exception as error:
        trace.error = type(error).__name__
    finally:
        session.client.clientpool.close()


def print_figures(figures: LoadFigures) -> None:
    table = Table("", "mean ms", "p50 ms", "p99 ms", "max ms")
    rows: Sequence[tuple[str, Distribution | None]] = (
        ("TTFT", figures.ttft_ms),
        ("TPOT", figures.tpot_ms),
        ("ITL", figures.itl_ms),
        ("E2E", figures.e2e_ms),
    )
    for name, spread in rows:
        if spread is not None:
            cells = (spread.mean, spread.p50, spread.p99, spread.max)
            table.add_row(name, *(f"{cell:.1f}" for cell in cells))
    console = Console()
    console.print(table)
    console.print(
        f"{figures.num_completed} of {figures.num_requests} requests in {figures.duration_s:.1f} s: "
        f"{figures.requests_per_s:.2f} requests/s, {figures.output_tokens_per_s:.1f} output tokens/s; "
        f"errors: {figures.errors or 'none'}"
    )


if __name__ == "__main__":
    main()
