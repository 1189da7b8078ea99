"""Latency and goodput of a real cluster past its capacity, with default settings and with `--ttft-slo-ms`.

    python -m bench.overload [--slo-ms 2000] [--quick] [--json FILE]

Capacity is the throughput of NUM_CLIENTS clients that each keep one request in flight and honour Retry-After. After
that, requests arrive at random at multiples of the capacity. Each load runs unmeasured for as long as it is measured.
Goodput counts requests that complete while it is measured, and with an SLO only those whose first token came in time.
Prompts never share a prefix. One shape keeps prefill busy, the other decode.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any

import aiohttp
import msgspec
import uvloop

from bench.noise_model import ensure_noise_model
from bench.ports import free_port
from bench.support.latency import Distribution, RequestTrace
from bench.support.report import Aim, Report, add_common_options, finish
from bench.support.servers import server, tandem

NUM_CLIENTS = 128
LOADS = (0.7, 1.0, 3.0)
AT_CAPACITY = "capacity"
MAX_REFUSAL_MS = 100.0
MAX_LATENCY_RATIO = 1.5
"""Aim for latencies at the highest load, relative to those at capacity, when early rejection is on."""
MIN_GOODPUT_RATIO = 0.97
"""Aim for goodput at the highest load, relative to load 1; two runs of 20 s differ by 3 %."""
_HEADERS = {"content-type": "application/json"}


class RequestShape(msgspec.Struct, frozen=True):
    """Tokens of each prompt and each output."""

    name: str
    prompt: int
    output: int


SHAPES = (RequestShape("long prompts", 1000, 8), RequestShape("long answers", 100, 64))


class OverloadClient:
    """Sends requests and records those sent between `begin` and `end`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, shape: RequestShape, seed: int) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._shape = shape
        self._rng = random.Random(seed)
        self._began_at = self._ended_at = float("inf")
        self._completed: list[RequestTrace] = []  # within the measured time, whenever they were sent
        self._served: list[RequestTrace] = []
        self._refusals_s: list[float] = []
        self._statuses: Counter[int] = Counter()

    def begin(self) -> None:
        self._began_at = time.perf_counter()

    async def send(self) -> float:
        """Sends one request. Returns the seconds of Retry-After, or 0 when it was served."""
        prompt = [self._rng.randrange(4, 2000) for _ in range(self._shape.prompt)]
        body = msgspec.json.encode(
            {"prompt": prompt, "max_tokens": self._shape.output, "ignore_eos": True, "stream": True, "temperature": 0}
        )
        trace = RequestTrace(time.perf_counter())
        async with self._session.post(self._url, data=body, headers=_HEADERS) as response:
            head_at = time.perf_counter()
            async for chunk in response.content.iter_any():
                trace.chunk_times += [time.perf_counter()] * chunk.count(b"data: {")
        if response.status == 200 and self._began_at <= time.perf_counter() < self._ended_at:
            self._completed.append(trace)
        if self._began_at <= trace.sent_at < self._ended_at:
            self._statuses[response.status] += 1
            if response.status == 200:
                self._served.append(trace)
            else:
                self._refusals_s.append(head_at - trace.sent_at)
        return float(response.headers.get("retry-after", 0))

    async def send_at_rate(self, per_s: float, seconds: float) -> None:
        """Measures the second half of twice `seconds`. Returns when every request has its response."""
        tasks = []
        end = time.perf_counter() + 2 * seconds
        asyncio.get_running_loop().call_later(seconds, self.begin)
        while time.perf_counter() < end:
            tasks.append(asyncio.create_task(self.send()))
            await asyncio.sleep(self._rng.expovariate(per_s))
        self._ended_at = time.perf_counter()
        await asyncio.gather(*tasks)

    async def send_always(self, seconds: float) -> None:
        """Keeps NUM_CLIENTS requests in flight; measures the second half of twice `seconds`."""
        end = time.perf_counter() + 2 * seconds
        asyncio.get_running_loop().call_later(seconds, self.begin)

        async def send_repeatedly() -> None:
            while time.perf_counter() < end:
                retry_after_s = await self.send()
                await asyncio.sleep(retry_after_s)

        sending = asyncio.gather(*(send_repeatedly() for _ in range(NUM_CLIENTS)))
        await asyncio.sleep(2 * seconds)
        self._ended_at = time.perf_counter()
        await sending

    def row(self, slo_s: float | None) -> dict[str, Any]:
        gaps = [gap for trace in self._served for gap in trace.itl_s]
        in_time = [trace for trace in self._completed if slo_s is None or trace.ttft_s <= slo_s]
        return {
            "goodput_per_s": round(len(in_time) / (self._ended_at - self._began_at), 2),
            "statuses": {str(status): number for status, number in sorted(self._statuses.items())},
            "ttft_ms": msgspec.to_builtins(Distribution.of_seconds([trace.ttft_s for trace in self._served])),
            "itl_ms": msgspec.to_builtins(Distribution.of_seconds(gaps)),
            "refusal_ms": msgspec.to_builtins(Distribution.of_seconds(self._refusals_s)),
        }


async def measure_load(
    url: str, shape: RequestShape, slo_s: float | None, load: float | None, per_s: float, seconds: float
) -> dict[str, Any]:
    """Returns the row of one load; None measures the capacity."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = OverloadClient(session, url, shape, int(100 * (load or 0)))
        sending: Coroutine[Any, Any, None] = (
            client.send_always(seconds) if load is None else client.send_at_rate(per_s, seconds)
        )
        await sending
        return {"load": load or AT_CAPACITY, "offered_per_s": round(per_s, 1)} | client.row(slo_s)


def measure(
    shapes: list[RequestShape], slo_s: float, seconds: float, loads: tuple[float, ...]
) -> Iterator[dict[str, Any]]:
    """Yields a row per cluster, shape and load. The capacity is measured without an SLO and used for both clusters."""
    capacity_per_s: dict[str, float] = {}
    for slo in (None, slo_s):
        flags = () if slo is None else ("--ttft-slo-ms", str(round(1000 * slo)))
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with server(tandem(ensure_noise_model(), port, *flags), port):
            for shape in shapes:
                case = {"shape": shape.name, "early_rejection": slo is not None}
                if slo is None:
                    row = uvloop.run(measure_load(url, shape, None, None, 0.0, seconds))
                    capacity_per_s[shape.name] = row["goodput_per_s"]
                    yield case | row
                for load in loads:
                    per_s = load * capacity_per_s[shape.name]
                    yield case | uvloop.run(measure_load(url, shape, slo, load, per_s, seconds))


def aims(rows: list[dict[str, Any]]) -> list[Aim]:
    """Aims for the highest load. Without an SLO the queue may grow up to the deadline, so latencies have no aim."""
    by_case = {(row["shape"], row["early_rejection"], row["load"]): row for row in rows}
    found: list[Aim] = []
    for shape, rejects in dict.fromkeys((row["shape"], row["early_rejection"]) for row in rows):
        highest, capacity = by_case[shape, rejects, max(LOADS)], by_case[shape, False, AT_CAPACITY]
        name = f"{shape}, {'--ttft-slo-ms' if rejects else 'defaults'}, load {max(LOADS):g}:"
        if rejects:
            for figure, percentile in (("ttft", "p50"), ("ttft", "p99"), ("itl", "p50"), ("itl", "p99")):
                ratio = highest[f"{figure}_ms"][percentile] / capacity[f"{figure}_ms"][percentile]
                what = f"{name} {figure.upper()} {percentile} / at capacity"
                found.append(Aim.of(what, ratio, MAX_LATENCY_RATIO, "lower"))
        if highest["refusal_ms"] is not None:
            found.append(Aim.of(f"{name} p99 of refusals, ms", highest["refusal_ms"]["p99"], MAX_REFUSAL_MS, "lower"))
        ratio = highest["goodput_per_s"] / by_case[shape, rejects, 1.0]["goodput_per_s"]
        found.append(Aim.of(f"{name} goodput / at load 1", ratio, MIN_GOODPUT_RATIO, "higher"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slo-ms", type=int, default=2000)
    parser.add_argument("--shape", choices=[shape.name for shape in SHAPES], help="measure only this shape")
    add_common_options(parser)
    options = parser.parse_args()
    seconds, loads = (4.0, (1.0, 3.0)) if options.quick else (20.0, LOADS)
    shapes = [shape for shape in SHAPES if options.shape in (None, shape.name)]
    rows: list[dict[str, Any]] = []
    for row in measure(shapes, options.slo_ms / 1000, seconds, loads):
        rows.append(row)
        print(json.dumps(row), flush=True)
    figures = {"slo_ms": options.slo_ms, "shapes": [msgspec.to_builtins(shape) for shape in SHAPES], "rows": rows}
    finish(Report.of("overload", figures, aims(rows)), options.json)


if __name__ == "__main__":
    main()
