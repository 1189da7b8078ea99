"""Stress for locust's own command, headless or with its web page: streamed requests with their TTFT, TPOT, ITL and E2E.

    locust -f bench/locustfile.py --headless --users 16 --run-time 30s --host http://127.0.0.1:8000
    locust -f bench/locustfile.py --headless --users 1 --request-rate 8 --ramp-to 40 --ramp-s 60 --run-time 90s ...

Without --request-rate so many users are busy all the time. With it requests come by a Poisson process of that rate,
whether or not earlier ones have been answered, and with --ramp-to the rate goes up or down in a line. Definitions are
those of `vllm bench serve` (`bench.latency`), goodput too: requests per second that meet every SLO that is given.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import json
import random
import time
from collections.abc import Iterator
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

from bench.arrivals import Ramp, next_gap
from bench.latency import SLO, RequestTrace, goodput, read_events, summarise
from bench.load import print_figures

TRACES: list[RequestTrace] = []
"""Of this process, or on a master of all workers, as they report them."""
_DRAIN_S = 60.0


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--model", default="tandem-demo", help="as the server names it")
    parser.add_argument("--api-key", default="", is_secret=True)
    parser.add_argument(
        "--kind", choices=["text", "image", "mixed"], default="text", help="mixed: four in ten are text"
    )
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens of a text request")
    parser.add_argument("--output-len", type=int, default=32, help="tokens to generate")
    parser.add_argument("--vocab", type=int, default=2000, help="prompt token ids are drawn from 4 to this")
    parser.add_argument(
        "--prompts", default="", metavar="FILE", help='texts to send, one after the other: JSON lines with a "prompt"'
    )
    parser.add_argument("--image-size", default="644x364", help="of the JPEGs, each another, that image requests send")
    parser.add_argument("--request-rate", type=float, default=0.0, help="per second, Poisson; 0 keeps users busy")
    parser.add_argument("--ramp-to", type=float, default=0.0, help="rate at the end of the ramp; 0 keeps it constant")
    parser.add_argument("--ramp-s", type=float, default=60.0, help="seconds that the ramp takes")
    parser.add_argument("--slo-ttft-ms", type=float, default=0.0, help="0 sets none")
    parser.add_argument("--slo-tpot-ms", type=float, default=0.0, help="0 sets none")
    parser.add_argument("--slo-e2e-ms", type=float, default=0.0, help="0 sets none")
    parser.add_argument("--figures", default="", metavar="FILE", help="write the figures there as JSON at the end")
    parser.add_argument("--traces", default="", metavar="FILE", help="write every request's times there as JSON")


class StreamingUser(FastHttpUser):
    """One client that sends the next request when the last has been answered; or one source of arrivals."""

    network_timeout = 600.0
    concurrency = 10_000
    wait_time = constant(0)

    def on_start(self) -> None:
        self._sent = Group()
        self._started_at = time.perf_counter()

    @task
    def act(self) -> None:
        options = self.environment.parsed_options
        assert options is not None
        if not options.request_rate:
            self._stream(options)
            return
        runner = self.environment.runner
        num_sources = max(1, runner.target_user_count if runner is not None else 1)
        rate = Ramp(options.request_rate, options.ramp_to or options.request_rate, options.ramp_s)
        gap_s = next_gap(rate, time.perf_counter() - self._started_at, num_sources, random)
        gevent.sleep(gap_s)
        self._sent.spawn(self._stream, options)

    def on_stop(self) -> None:
        self._sent.join(timeout=_DRAIN_S)

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
                # Line by line: locust's own iterator waits for full kilobytes and blurs the times.
                read_events(iter(lambda: response._response.readline(b"\n"), b""), trace)
            if not trace.error and trace.num_output_tokens != options.output_len:
                trace.error = f"{trace.num_output_tokens} tokens in place of {options.output_len}"
            if trace.error:
                response.failure(trace.error)
            else:
                self._tell(trace)

    def _tell(self, trace: RequestTrace) -> None:
        """As requests of their own, which is what locust's tables and charts know; its own time ends at the headers."""
        tpot_s = trace.tpot_s
        told = [("TTFT", trace.ttft_s), ("E2E", trace.e2e_s), *(("ITL", gap_s) for gap_s in trace.itl_s)]
        if tpot_s is not None:
            told.append(("TPOT", tpot_s))
        for name, seconds in told:
            fields: dict[str, Any] = {"exception": None, "context": {}, "response_length": 0}
            self.environment.events.request.fire(
                request_type="stream", name=name, response_time=seconds * 1e3, **fields
            )


# ---- bodies


def _common(options: Any) -> dict[str, Any]:
    return {
        "model": options.model,
        "max_tokens": options.output_len,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def text_body(options: Any) -> tuple[str, dict[str, Any]]:
    prompt: str | list[int] = [random.randrange(4, options.vocab) for _ in range(options.input_len)]
    if options.prompts:
        prompt = next(_texts(options.prompts))
    return "/v1/completions", {**_common(options), "prompt": prompt}


@functools.cache
def _texts(file: str) -> Iterator[str]:
    """Of the file, from its beginning again when it has ended; of all users of this process together."""
    texts = [str(json.loads(line)["prompt"]) for line in Path(file).read_text().splitlines() if line]
    return itertools.cycle(texts)


def image_body(options: Any) -> tuple[str, dict[str, Any]]:
    """A chat about an image that nobody has sent before: small noise, enlarged, so that it compresses as photos do."""
    from PIL import Image

    width, height = map(int, options.image_size.split("x"))
    small = Image.frombytes("RGB", (16, 9), random.randbytes(16 * 9 * 3))
    file = io.BytesIO()
    small.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
    url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return "/v1/chat/completions", {**_common(options), "messages": [{"role": "user", "content": content}]}


# ---- figures


@events.report_to_master.add_listener
def send_traces(client_id: str, data: dict[str, Any], **_: Any) -> None:
    """Those that have ended since the last report."""
    ended = [trace for trace in TRACES if trace.error or trace.num_output_tokens]
    TRACES[:] = [trace for trace in TRACES if not (trace.error or trace.num_output_tokens)]
    data["traces"] = msgspec.to_builtins(ended)


@events.worker_report.add_listener
def take_traces(client_id: str, data: dict[str, Any], **_: Any) -> None:
    TRACES.extend(msgspec.convert(data.get("traces", []), list[RequestTrace]))


@events.quitting.add_listener
def tell_figures(environment: Environment, **_: Any) -> None:
    options = environment.parsed_options
    if isinstance(environment.runner, WorkerRunner) or options is None or not TRACES:
        return
    for trace in TRACES:
        if not trace.error and not trace.num_output_tokens:
            trace.error = "unfinished"
    if options.traces:
        Path(options.traces).write_bytes(msgspec.json.encode(TRACES))
    figures = summarise(TRACES)
    slo = SLO(options.slo_ttft_ms / 1e3, options.slo_tpot_ms / 1e3, options.slo_e2e_ms / 1e3)
    print_figures(figures)
    good_per_s = goodput(TRACES, slo)
    print(f"goodput: {good_per_s:.2f} requests/s within {slo.in_words()}")
    if isinstance(environment.runner, MasterRunner):
        print("times of several machines are each of that machine's clock; rates are over all that ran at once")
    if options.figures:
        told = {"figures": msgspec.to_builtins(figures), "goodput_per_s": good_per_s, "slo": msgspec.to_builtins(slo)}
        told["locust"] = {
            entry.name: {"mean_ms": entry.avg_response_time, "count": entry.num_requests}
            for entry in environment.stats.entries.values()
        }
        Path(options.figures).write_text(json.dumps(told, indent=2) + "\n")
