"""Load generator for the locust command, headless or with its web page, with TTFT, TPOT, ITL and E2E of streams.

    locust -f bench/locustfile.py --headless --users 16 --run-time 30s --host http://127.0.0.1:8000
    locust -f bench/locustfile.py --headless --users 1 --request-rate 8 --ramp-to 40 --ramp-s 60 --run-time 90s ...

Without --request-rate each user sends its next request when the last one has completed. With it, requests arrive as a
Poisson process of that rate, whether or not earlier ones have completed, so a slow server does not slow the load down;
--ramp-to changes the rate linearly. `bench.support.latency` defines the figures.
"""

from __future__ import annotations

import base64
import io
import json
import random
import time
from pathlib import Path
from typing import Any

import gevent
import msgspec
from gevent.pool import Group
from locust import constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FastHttpUser
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from bench.support.arrivals import Ramp, next_gap
from bench.support.latency import SLO, RequestTrace, goodput, print_figures, read_events, summarise

TRACES: list[RequestTrace] = []
"""Requests of this process; on a locust master, the completed requests of all workers."""
_DRAIN_S = 60.0


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--model", default="tandem-demo", help="model name on the server")
    parser.add_argument("--api-key", default="", is_secret=True)
    parser.add_argument("--kind", choices=["text", "image", "mixed"], default="text", help="mixed: 40 %% text")
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens of a text request")
    parser.add_argument("--output-len", type=int, default=32, help="tokens to generate")
    parser.add_argument("--vocab", type=int, default=2000, help="prompt token ids are drawn from 4 to this")
    parser.add_argument("--image-size", default="644x364", help="size of the JPEGs of image requests, all different")
    parser.add_argument("--request-rate", type=float, default=0.0, help="per second, Poisson; 0: users send in turn")
    parser.add_argument("--ramp-to", type=float, default=0.0, help="rate at the end of the ramp; 0: constant rate")
    parser.add_argument("--ramp-s", type=float, default=60.0, help="duration of the ramp in seconds")
    parser.add_argument("--slo-ttft-ms", type=float, default=0.0, help="limit for goodput; 0: none")
    parser.add_argument("--slo-tpot-ms", type=float, default=0.0, help="limit for goodput; 0: none")
    parser.add_argument("--slo-e2e-ms", type=float, default=0.0, help="limit for goodput; 0: none")
    parser.add_argument("--figures", default="", metavar="FILE", help="write the figures as JSON at the end")


class StreamingUser(FastHttpUser):
    """Client that sends one request after the other, or one source of Poisson arrivals."""

    network_timeout = 600.0
    concurrency = 10_000
    wait_time = constant(0)

    def on_start(self) -> None:
        self._in_flight = Group()
        self._started_at = time.perf_counter()

    @task
    def send(self) -> None:
        options = self.environment.parsed_options
        assert options is not None
        if not options.request_rate:
            self._stream(options)
            return
        runner = self.environment.runner
        num_sources = max(1, runner.target_user_count if runner is not None else 1)
        rate = Ramp(options.request_rate, options.ramp_to or options.request_rate, options.ramp_s)
        gevent.sleep(next_gap(rate, time.perf_counter() - self._started_at, num_sources, random))
        self._in_flight.spawn(self._stream, options)

    def on_stop(self) -> None:
        self._in_flight.join(timeout=_DRAIN_S)

    def _stream(self, options: Any) -> None:
        kind = options.kind if options.kind != "mixed" else random.choices(["text", "image"], [4, 6])[0]
        path, body = text_body(options) if kind == "text" else image_body(options)
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        trace = RequestTrace(sent_at=time.perf_counter())
        TRACES.append(trace)
        with self.client.request(
            "POST", path, json=body, headers=headers, stream=True, catch_response=True
        ) as response:
            if response.status_code != 200:
                trace.error = f"HTTP {response.status_code}"
            else:
                # Reads line by line: locust's iterator waits for whole kilobytes and distorts the times.
                read_events(iter(lambda: response._response.readline(b"\n"), b""), trace)
            if not trace.error and trace.num_output_tokens != options.output_len:
                trace.error = f"{trace.num_output_tokens} tokens instead of {options.output_len}"
            if trace.error:
                response.failure(trace.error)
            else:
                self._report(trace)

    def _report(self, trace: RequestTrace) -> None:
        """Reports each figure as a request, so that it appears in locust's tables; its own time ends at the headers."""
        figures = [("TTFT", trace.ttft_s), ("E2E", trace.e2e_s), *(("ITL", gap_s) for gap_s in trace.itl_s)]
        if trace.tpot_s is not None:
            figures.append(("TPOT", trace.tpot_s))
        for name, seconds in figures:
            fields: dict[str, Any] = {"exception": None, "context": {}, "response_length": 0}
            self.environment.events.request.fire(
                request_type="stream", name=name, response_time=seconds * 1e3, **fields
            )


def _common(options: Any) -> dict[str, Any]:
    return {
        "model": options.model,
        "max_tokens": options.output_len,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def text_body(options: Any) -> tuple[str, dict[str, Any]]:
    prompt = [random.randrange(4, options.vocab) for _ in range(options.input_len)]
    return "/v1/completions", {**_common(options), "prompt": prompt}


def image_body(options: Any) -> tuple[str, dict[str, Any]]:
    """Makes a chat about a new image: enlarged small noise, which compresses as photographs do."""
    from PIL import Image

    width, height = map(int, options.image_size.split("x"))
    small = Image.frombytes("RGB", (16, 9), random.randbytes(16 * 9 * 3))
    file = io.BytesIO()
    small.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
    url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return "/v1/chat/completions", {**_common(options), "messages": [{"role": "user", "content": content}]}


@events.report_to_master.add_listener
def send_traces(client_id: str, data: dict[str, Any], **_: Any) -> None:
    """Sends the requests that completed since the last report."""
    completed = [trace for trace in TRACES if trace.error or trace.num_output_tokens]
    TRACES[:] = [trace for trace in TRACES if not (trace.error or trace.num_output_tokens)]
    data["traces"] = msgspec.to_builtins(completed)


@events.worker_report.add_listener
def receive_traces(client_id: str, data: dict[str, Any], **_: Any) -> None:
    TRACES.extend(msgspec.convert(data.get("traces", []), list[RequestTrace]))


@events.quitting.add_listener
def print_summary(environment: Environment, **_: Any) -> None:
    """Prints the figures and writes them to --figures."""
    options = environment.parsed_options
    if isinstance(environment.runner, WorkerRunner) or options is None or not TRACES:
        return
    for trace in TRACES:
        if not trace.error and not trace.num_output_tokens:
            trace.error = "unfinished"
    figures = summarise(TRACES)
    slo = SLO(options.slo_ttft_ms / 1e3, options.slo_tpot_ms / 1e3, options.slo_e2e_ms / 1e3)
    print_figures(figures)
    good_per_s = goodput(TRACES, slo)
    print(f"goodput: {good_per_s:.2f} requests/s within {slo.describe()}")
    if isinstance(environment.runner, MasterRunner):
        print("note: each worker uses its own clock, so rates over several machines are approximate")
    if options.figures:
        summary = {
            "figures": msgspec.to_builtins(figures),
            "goodput_per_s": good_per_s,
            "slo": msgspec.to_builtins(slo),
            "locust": {
                entry.name: {"mean_ms": entry.avg_response_time, "count": entry.num_requests}
                for entry in environment.stats.entries.values()
            },
        }
        Path(options.figures).write_text(json.dumps(summary, indent=2) + "\n")
