"""Time to first token of short prompts by both routes: through prefill, and computed by the decode worker itself.

`python -m bench.decode_prefill [--model DIR]` starts a cluster for each route, one after the other.
Requests come one at a time, first with nothing else to do and then beside streams, whose gaps are measured too.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from statistics import mean, median
from typing import Any

import httpx

from bench.report import Report, add_common_options, finish
from tests.support.cluster import Cluster

LENGTHS = (16, 32, 64, 128, 256)
NUM_STREAMS = 8


def first_token_s(client: httpx.Client, url: str, prompt: list[int]) -> float:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    started = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        first = None
        for line in answer.iter_lines():
            if first is None and line.startswith("data: {"):
                first = time.perf_counter() - started
    assert first is not None, answer.status_code
    return first


class Streams:
    """Runs long streams and keeps the gaps between their chunks."""

    def __init__(self, url: str, number: int) -> None:
        self._url = url
        self._stop = threading.Event()
        self.gaps: list[float] = []
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        body = {"prompt": [9] * 40, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=60) as client:
            while not self._stop.is_set():
                with client.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
                    before = None
                    for line in answer.iter_lines():
                        if self._stop.is_set():
                            break
                        if line.startswith("data: {"):
                            now = time.perf_counter()
                            if before is not None:
                                self.gaps.append(now - before)
                            before = now

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)


def measure(route: str, arguments: list[str], num_streams: int, num_requests: int) -> list[dict[str, Any]]:
    rng = random.Random(1)
    rows = []
    with Cluster(*arguments) as cluster, httpx.Client(timeout=60) as client:
        for _ in range(5):
            first_token_s(client, cluster.url, [rng.randrange(4, 2000) for _ in range(64)])
        for busy in (0, num_streams):
            streams = Streams(cluster.url, busy)
            time.sleep(1.0 if busy else 0.0)
            for length in LENGTHS:
                streams.gaps.clear()
                times = []
                for _ in range(num_requests):
                    times.append(first_token_s(client, cluster.url, [rng.randrange(4, 2000) for _ in range(length)]))
                row = {
                    "route": route,
                    "streams": busy,
                    "prompt_tokens": length,
                    "ttft_ms_median": round(1000 * median(times), 2),
                    "ttft_ms_mean": round(1000 * mean(times), 2),
                }
                if busy and streams.gaps:
                    gaps = sorted(streams.gaps)
                    row["stream_itl_ms_mean"] = round(1000 * mean(gaps), 2)
                    row["stream_itl_ms_p99"] = round(1000 * gaps[int(0.99 * len(gaps))], 2)
                print(json.dumps(row), flush=True)
                rows.append(row)
            streams.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="folder of the model; empty takes the noise model")
    add_common_options(parser)
    arguments = parser.parse_args()
    model = ["--model", arguments.model] if arguments.model else []
    num_requests = 5 if arguments.quick else 40
    rows = measure("through prefill", [*model, "--decode-prefill-threshold", "0"], NUM_STREAMS, num_requests)
    rows += measure("decode alone", [*model, "--decode-prefill-threshold", "4096"], NUM_STREAMS, num_requests)
    finish(Report.of("decode_prefill", {"num_requests": num_requests, "rows": rows}), arguments.json)


if __name__ == "__main__":
    main()
