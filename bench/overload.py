"""What a real cluster does past its capacity, as it comes and with early rejection: `python -m bench.overload`.

Capacity is what it serves, without early rejection, to as many clients as may run and wait at once, each of which
always has one request under way, or waits as Retry-After tells it. Then requests that have nothing in common arrive at
random, at multiples of that rate; each load runs for a while before it is measured, so that what is seen lasts. Two
kinds: prompts that keep prefill busy, and answers that keep decode busy. Goodput: answers a second that end while it is
measured, with `--ttft-slo-ms` those whose first token came in time.

All of it twice: with the cores as they are, which clients, proxy and workers share, so that whoever is refused takes
time from those who are served; and with a fixed part of a core for each worker, as if each were a machine. How much
each kind of process uses is told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
import uvloop

from bench.core_share import NoCoreShares, same_shares
from bench.latency import Distribution, RequestTrace
from bench.process_cpu import cpu_s_by_module
from bench.report import Aim, Report, add_common_options, finish
from tests.support.cluster import Cluster

NUM_CLIENTS = 128
"""Of the measurement at capacity: as many as a decode worker runs at once, and as many as may always wait."""
NUM_BODIES = 8192
"""Made beforehand: the clients have part of the same cores."""
_HEADERS = {"content-type": "application/json"}
LOADS = (0.7, 1.0, 3.0)
AT_CAPACITY = "capacity"
REFUSAL_MS = 100.0
SLOWER = 1.5
NOT_LESS = 0.97
"""Of the goodput at a load of 1: two measurements of 20 s of the same differ by so much."""
WORKER_SHARE = 0.65
"""Of a core; two of them leave 0.7 of two cores to the proxy and the clients."""


class Shape(msgspec.Struct, frozen=True):
    """What is asked for, in tokens."""

    name: str
    prompt: int
    output: int


SHAPES = (Shape("long prompts", 1000, 8), Shape("long answers", 100, 64))


class Client:
    """Sends requests and keeps what became of those sent after `begin`."""

    def __init__(self, session: aiohttp.ClientSession, cluster: Cluster, shape: Shape, seed: int) -> None:
        self._session = session
        self._url = f"{cluster.url}/v1/completions"
        self._pids = cluster.pids()
        self._shape = shape
        self._rng = random.Random(seed)
        self._bodies = [self._body() for _ in range(NUM_BODIES)]
        self._begun_at = float("inf")
        self._ended_at = float("inf")
        self._own_cpu_s = 0.0
        self._cpu_s: dict[str, float] = {}
        self._answered: list[RequestTrace] = []  # in that time, whenever they were sent
        self.traces: list[RequestTrace] = []
        self.refusals_s: list[float] = []
        self.statuses: Counter[int] = Counter()

    def begin(self) -> None:
        self._begun_at = time.perf_counter()
        self._own_cpu_s, self._cpu_s = time.process_time(), cpu_s_by_module(self._pids)

    def end(self) -> float:
        """Seconds since `begin`."""
        self._ended_at = time.perf_counter()
        self._own_cpu_s = time.process_time() - self._own_cpu_s
        self._cpu_s = {part: cpu_s - self._cpu_s[part] for part, cpu_s in cpu_s_by_module(self._pids).items()}
        return self._ended_at - self._begun_at

    def _body(self) -> bytes:
        prompt = [self._rng.randrange(4, 2000) for _ in range(self._shape.prompt)]
        body = {
            "prompt": prompt, "max_tokens": self._shape.output, "ignore_eos": True, "stream": True, "temperature": 0,
        }  # fmt: skip
        return msgspec.json.encode(body)

    async def ask(self) -> float:
        """Seconds to wait before the next; 0 when it was served."""
        body = self._bodies.pop() if self._bodies else self._body()
        trace = RequestTrace(time.perf_counter())
        async with self._session.post(self._url, data=body, headers=_HEADERS) as answer:
            headed_at = time.perf_counter()
            async for piece in answer.content.iter_any():
                trace.chunk_times += [time.perf_counter()] * piece.count(b"data: {")
        if answer.status == 200 and self._begun_at <= time.perf_counter() < self._ended_at:
            self._answered.append(trace)
        retry_after_s = float(answer.headers.get("retry-after", 0))
        if not self._begun_at <= trace.sent_at < self._ended_at:
            return retry_after_s
        self.statuses[answer.status] += 1
        if answer.status == 200:
            self.traces.append(trace)
        else:
            self.refusals_s.append(headed_at - trace.sent_at)
        return retry_after_s

    async def ask_at(self, per_s: float, warm_up_s: float, seconds: float) -> float:
        """Seconds that were measured. Returns when all is answered."""
        tasks = []
        end = time.perf_counter() + warm_up_s + seconds
        asyncio.get_running_loop().call_later(warm_up_s, self.begin)
        while time.perf_counter() < end:
            tasks.append(asyncio.create_task(self.ask()))
            await asyncio.sleep(self._rng.expovariate(per_s))
        measured_s = self.end()
        await asyncio.gather(*tasks)
        return measured_s

    async def ask_always(self, warm_up_s: float, seconds: float) -> float:
        """Seconds that were measured. Returns when all is answered."""
        end = time.perf_counter() + warm_up_s + seconds
        asyncio.get_running_loop().call_later(warm_up_s, self.begin)

        async def again_and_again() -> None:
            while time.perf_counter() < end:
                retry_after_s = await self.ask()
                await asyncio.sleep(retry_after_s)

        asking = asyncio.gather(*(again_and_again() for _ in range(NUM_CLIENTS)))
        await asyncio.sleep(warm_up_s + seconds)
        measured_s = self.end()
        await asking
        return measured_s

    def row(self, measured_s: float, slo_s: float | None) -> dict[str, Any]:
        gaps = [gap for trace in self.traces for gap in trace.itl_s]
        in_time = [trace for trace in self._answered if slo_s is None or trace.ttft_s <= slo_s]
        return {
            "goodput_per_s": round(len(in_time) / measured_s, 2),
            "statuses": {str(status): number for status, number in sorted(self.statuses.items())},
            "ttft_ms": msgspec.to_builtins(Distribution.of_seconds([trace.ttft_s for trace in self.traces])),
            "itl_ms": msgspec.to_builtins(Distribution.of_seconds(gaps)),
            "refusal_ms": msgspec.to_builtins(Distribution.of_seconds(self.refusals_s)),
            "cores": {"client": round(self._own_cpu_s / measured_s, 3)}
            | {module: round(cpu_s / measured_s, 3) for module, cpu_s in sorted(self._cpu_s.items())},
        }


async def at_capacity(cluster: Cluster, shape: Shape, seconds: float) -> dict[str, Any]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(session, cluster, shape, 1)
        measured_s = await client.ask_always(seconds / 2, seconds)
        return {"load": AT_CAPACITY} | client.row(measured_s, None)


async def under_load(
    cluster: Cluster, shape: Shape, slo_s: float | None, load: float, per_s: float, seconds: float
) -> dict[str, Any]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(session, cluster, shape, int(100 * load))
        measured_s = await client.ask_at(per_s, seconds, seconds)
        return {"load": load, "offered_per_s": round(per_s, 1)} | client.row(measured_s, slo_s)


def aims(rows: list[dict[str, Any]]) -> list[Aim]:
    """Of the highest load, on the same cores: against the same shape at capacity, and in goodput against load 1."""
    found: list[Aim] = []
    for share, shape, rejects in dict.fromkeys((r["worker_share"], r["shape"], r["early_rejection"]) for r in rows):
        of_shape = [row for row in rows if (row["worker_share"], row["shape"]) == (share, shape)]
        capacity = next(row for row in of_shape if row["load"] == AT_CAPACITY)
        most = next(row for row in of_shape if (row["early_rejection"], row["load"]) == (rejects, max(LOADS)))
        cores = f"{share} of a core each" if share else "shared cores"
        name = f"{cores}, {shape}, {'--ttft-slo-ms' if rejects else 'defaults'}, load {most['load']:g}:"
        for figure, part in (("ttft", "p50"), ("ttft", "p99"), ("itl", "p50"), ("itl", "p99")):
            ratio = most[f"{figure}_ms"][part] / capacity[f"{figure}_ms"][part]
            found.append(Aim.of(f"{name} {figure.upper()} {part}, times that at capacity", ratio, SLOWER, "lower"))
        if most["refusal_ms"] is not None:
            found.append(Aim.of(f"{name} refusals p99, ms", most["refusal_ms"]["p99"], REFUSAL_MS, "lower"))
        one = next(row for row in of_shape if (row["early_rejection"], row["load"]) == (rejects, 1.0))
        ratio = most["goodput_per_s"] / one["goodput_per_s"]
        found.append(Aim.of(f"{name} goodput, times that of load 1", ratio, NOT_LESS, "higher"))
    return found


def measure_with(
    share: float, shapes: list[Shape], slo_s: float, seconds: float, loads: tuple[float, ...]
) -> Iterator[dict[str, Any]]:
    """share: of a core for each worker, 0 sets no limit. Raises NoCoreShares."""
    capacity_per_s: dict[str, float] = {}
    for rejects in (False, True):
        with Cluster(*(("--ttft-slo-ms", str(round(1000 * slo_s))) if rejects else ())) as cluster:
            pids = [report.worker.pid for report in cluster.status().workers]
            with same_shares(pids, share):
                for row in measure(cluster, shapes, slo_s if rejects else None, seconds, loads, capacity_per_s):
                    yield {"worker_share": share} | row


def measure(
    cluster: Cluster, shapes: list[Shape], slo_s: float | None, seconds: float, loads: tuple[float, ...],
    capacity_per_s: dict[str, float],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """capacity_per_s: by shape; found without early rejection, and used with it."""
    for shape in shapes:
        told = {"shape": shape.name, "early_rejection": slo_s is not None}
        if slo_s is None:
            row = uvloop.run(at_capacity(cluster, shape, seconds))
            capacity_per_s[shape.name] = row["goodput_per_s"]
            yield told | row
        for load in loads:
            per_s = load * capacity_per_s[shape.name]
            yield told | uvloop.run(under_load(cluster, shape, slo_s, load, per_s, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slo-ms", type=int, default=2000)
    parser.add_argument("--shape", choices=[shape.name for shape in SHAPES], default=None, help="this one alone")
    parser.add_argument("--cores", choices=["shared", "own", "both"], default="both", help="own: takes root")
    add_common_options(parser)
    arguments = parser.parse_args()
    seconds, loads = (4.0, (1.0, 3.0)) if arguments.quick else (20.0, LOADS)
    shapes = [shape for shape in SHAPES if arguments.shape in (None, shape.name)]
    shares = {"shared": [0.0], "own": [WORKER_SHARE], "both": [0.0, WORKER_SHARE]}[arguments.cores]
    rows: list[Any] = []
    try:
        for share in shares:
            for row in measure_with(share, shapes, arguments.slo_ms / 1000, seconds, loads):
                rows.append(row)
                print(json.dumps(row), flush=True)
    except NoCoreShares as error:
        sys.exit(f"{error}; --cores shared does without")
    figures = {"slo_ms": arguments.slo_ms, "shapes": [msgspec.to_builtins(shape) for shape in SHAPES], "rows": rows}
    finish(Report.of("overload", figures, aims(rows)), arguments.json)


if __name__ == "__main__":
    main()
