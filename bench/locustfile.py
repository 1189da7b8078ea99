"""Load for locust's own command: streamed completions, told to locust as `TTFT`, `ITL` and `E2E`.

    locust -f bench/locustfile.py --headless --users 16 --spawn-rate 16 --run-time 30s --host http://127.0.0.1:8000

`bench.load` sends requests at set times and gives percentiles of one run; this one keeps so many users busy, and is
what a locust installation with a web page or many machines takes.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

from locust import events, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FastHttpUser

from bench.latency import RequestTrace
from bench.load import read_events


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--model", default="tandem-demo", help="as the server names it")
    parser.add_argument("--api-key", default="", is_secret=True)
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens of each request")
    parser.add_argument("--output-len", type=int, default=32, help="tokens to generate")
    parser.add_argument("--vocab", type=int, default=2000, help="prompt token ids are drawn from 4 to this")


class StreamingUser(FastHttpUser):
    """One client that sends the next request when the last has been answered."""

    network_timeout = 600.0

    @task
    def stream(self) -> None:
        options = self.environment.parsed_options
        assert options is not None
        body = {
            "model": options.model,
            "prompt": [random.randrange(4, options.vocab) for _ in range(options.input_len)],
            "max_tokens": options.output_len,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        trace = RequestTrace(sent_at=time.perf_counter())
        with self.client.request(
            "POST", "/v1/completions", json=body, headers=headers, stream=True, catch_response=True
        ) as response:
            if response.status_code != 200:
                response.failure(f"HTTP {response.status_code}")
                return
            # Line by line: locust's own iterator waits for full kilobytes and blurs the times.
            read_events(iter(lambda: response._response.readline(b"\n"), b""), trace)
            if trace.error:
                response.failure(trace.error)
            elif trace.num_output_tokens != options.output_len:
                response.failure(f"{trace.num_output_tokens} tokens in place of {options.output_len}")
            else:
                self._tell(trace)

    def _tell(self, trace: RequestTrace) -> None:
        """As requests of their own, which is what locust's tables and charts know; its own time ends at the headers."""
        moments = [trace.sent_at, *trace.chunk_times]
        gaps_s = [after - before for before, after in itertools.pairwise(moments)]
        told = [("TTFT", gaps_s[0]), *(("ITL", gap_s) for gap_s in gaps_s[1:]), ("E2E", sum(gaps_s))] if gaps_s else []
        for name, seconds in told:
            fields: dict[str, Any] = {"exception": None, "context": {}, "response_length": 0}
            self.environment.events.request.fire(
                request_type="stream", name=name, response_time=seconds * 1e3, **fields
            )
