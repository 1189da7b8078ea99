"""What a real cluster does past saturation, with and without early rejection: `python -m bench.overload`.

Prompts that have nothing in common arrive at random, at multiples of the rate that the cluster can serve, which is
measured first. Goodput: first tokens a second that came within the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import aiohttp

from bench.report import Report, add_common_options, finish
from tests.cluster import Cluster

PROMPT_TOKENS = 1000
OUTPUT_TOKENS = 4


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._rng = random.Random(seed)
        self.ttfts: list[float] = []
        self.statuses: Counter[int] = Counter()
        self.retry_after_s: list[int] = []

    async def ask(self) -> None:
        prompt = [self._rng.randrange(4, 2000) for _ in range(PROMPT_TOKENS)]
        body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
        started = time.perf_counter()
        async with self._session.post(self._url, json=body) as answer:
            self.statuses[answer.status] += 1
            if answer.status != 200:
                self.retry_after_s.append(int(answer.headers["retry-after"]))
                return
            first = True
            async for line in answer.content:
                if first and line.startswith(b"data: {"):
                    self.ttfts.append(time.perf_counter() - started)
                    first = False

    async def ask_at(self, per_s: float, seconds: float) -> None:
        tasks = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            tasks.append(asyncio.create_task(self.ask()))
            await asyncio.sleep(self._rng.expovariate(per_s))
        await asyncio.gather(*tasks)


async def saturation_per_s(session: aiohttp.ClientSession, url: str, seconds: float) -> float:
    """Requests a second with sixteen always under way."""
    client = Client(session, url, 1)
    end = time.perf_counter() + seconds

    async def again_and_again() -> None:
        while time.perf_counter() < end:
            await client.ask()

    await asyncio.gather(*(again_and_again() for _ in range(16)))
    return len(client.ttfts) / seconds


async def measure(url: str, rates: dict[float, float], seconds: float, slo_s: float, rejects: bool) -> list[Any]:
    rows = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        warm = Client(session, url, 2)
        await asyncio.gather(*(warm.ask() for _ in range(4)))
        for load, per_s in rates.items():
            client = Client(session, url, int(100 * load))
            await client.ask_at(per_s, seconds)
            good = sum(ttft_s <= slo_s for ttft_s in client.ttfts)
            ordered = sorted(client.ttfts)
            rows.append(
                {
                    "load": load,
                    "early_rejection": rejects,
                    "offered_per_s": round(per_s, 1),
                    "goodput_per_s": round(good / seconds, 1),
                    "late": len(ordered) - good,
                    "statuses": {str(status): number for status, number in client.statuses.items()},
                    "ttft_ms_p50": round(1000 * ordered[len(ordered) // 2], 1) if ordered else None,
                    "ttft_ms_p99": round(1000 * ordered[int(0.99 * len(ordered))], 1) if ordered else None,
                    "retry_after_s_most": max(client.retry_after_s, default=None),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


async def _saturation(url: str, seconds: float) -> float:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await saturation_per_s(session, url, 2.0)
        return await saturation_per_s(session, url, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slo-ms", type=int, default=1000)
    add_common_options(parser)
    arguments = parser.parse_args()
    slo_s, seconds = arguments.slo_ms / 1000, 3.0 if arguments.quick else 10.0
    with Cluster() as cluster:
        saturation = asyncio.run(_saturation(cluster.url, seconds))
        print(f"saturated at {saturation:.1f} requests/s of {PROMPT_TOKENS} tokens", flush=True)
        rates = {load: load * saturation for load in (0.7, 1.3, 2.0)}
        rows = asyncio.run(measure(cluster.url, rates, seconds, slo_s, rejects=False))
    with Cluster("--ttft-slo-ms", str(arguments.slo_ms)) as cluster:
        rows += asyncio.run(measure(cluster.url, rates, seconds, slo_s, rejects=True))
    figures = {
        "prompt_tokens": PROMPT_TOKENS,
        "slo_ms": arguments.slo_ms,
        "saturation_per_s": round(saturation, 1),
        "rows": rows,
    }
    finish(Report.of("overload", figures), arguments.json)


if __name__ == "__main__":
    main()
