"""Soak test on a host that is merely slow: no worker may be lost, and no request may fail.

    python -m tests.faults.stalled_host [--minutes 10] [--seed N] [--quick] [--json FILE]

A prefill and two decode workers serve random requests while programs that only compute compete for the processors: four
for each of at most two cores. Every few seconds a worker is stopped for 0.5 to 2.4 s, which is just below the silence
after which a proxy takes a worker as lost. Nothing exits, so whatever is lost or fails is a wrong conclusion from time.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import httpx
from rich.console import Console

from bench.support.report import Aim, Report, finish, new_parser
from tandem.runtime.cores import num_cores
from tests.support.cluster import MODEL, Cluster

NUM_BURNERS = 4 * min(2, num_cores())
MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 2.4
MAX_RUN_S = 4.0
"""Longest time between two pauses."""
NUM_CLIENTS = 6
REQUEST_TIMEOUT_S = 120.0
OPTIONS = ("--prefill", "1", "--decode", "2", "--threads-per-worker", "1", "--kv-cache-gib", "0.1")


def burn() -> subprocess.Popen[bytes]:
    """Starts a program that only computes, until it is killed or this process ends."""
    code = f"import os\nwhile os.getppid() == {os.getpid()}:\n for _ in range(10**6): pass"
    return subprocess.Popen([sys.executable, "-c", code])


async def ask(client: httpx.AsyncClient, rng: random.Random, end: float, outcomes: Counter[str]) -> None:
    """Sends one random request after the other. Counts `answered`, or the error."""
    while time.monotonic() < end:
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": rng.choices(range(4, 2000), k=rng.choice([8, 60, 400, 1200])),
            "max_tokens": rng.choice([1, 8, 40, 150]),
            "n": rng.choice([1, 1, 1, 3]),
            "ignore_eos": True,
        }
        try:
            response = await client.post("/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S)
            outcomes["answered" if response.status_code == 200 else f"{response.status_code} {response.text}"] += 1
        except httpx.HTTPError as error:
            outcomes[repr(error)] += 1
        await asyncio.sleep(rng.uniform(0, 0.5))


async def pause_workers(pids: dict[str, int], rng: random.Random, end: float, pauses: list[float]) -> None:
    """Stops a worker at a time. pauses: receives their lengths in seconds."""
    while time.monotonic() < end:
        await asyncio.sleep(rng.uniform(0.2, MAX_RUN_S))
        name, pause_s = rng.choice(list(pids)), rng.uniform(MIN_PAUSE_S, MAX_PAUSE_S)
        os.kill(pids[name], signal.SIGSTOP)
        try:
            await asyncio.sleep(pause_s)
        finally:
            os.kill(pids[name], signal.SIGCONT)
        pauses.append(pause_s)


def worker_pids(cluster: Cluster) -> dict[str, int]:
    return {each.worker.worker_id: each.worker.pid for each in cluster.status().workers}


def soak(cluster: Cluster, seconds: float, rng: random.Random) -> dict[str, Any]:
    pids = worker_pids(cluster)
    outcomes: Counter[str] = Counter()
    pauses: list[float] = []
    asyncio.run(disturb(cluster.url, pids, seconds, rng, outcomes, pauses))
    lost = [line for line in cluster.logs().splitlines() if " lost " in line and "(epoch " in line]
    return {
        "seconds": seconds,
        "load_average": round(os.getloadavg()[0], 2),
        "num_pauses": len(pauses),
        "longest_pause_s": round(max(pauses, default=0.0), 2),
        "answered": outcomes.pop("answered", 0),
        "failed": dict(outcomes),
        "lost": lost,
        "exited": sorted(name for name, pid in worker_pids(cluster).items() if pids[name] != pid),
    }


async def disturb(
    url: str, pids: dict[str, int], seconds: float, rng: random.Random, outcomes: Counter[str], pauses: list[float]
) -> None:
    """Sends requests and stops workers at the same time."""
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url) as client:
        clients = (ask(client, random.Random(rng.random()), end, outcomes) for _ in range(NUM_CLIENTS))
        await asyncio.gather(pause_workers(pids, rng, end, pauses), *clients)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    seconds = 60.0 if arguments.quick else 60 * arguments.minutes
    with Cluster(*OPTIONS, start_timeout_s=240) as cluster, ExitStack() as burners:
        for _ in range(NUM_BURNERS):
            process = burn()
            burners.callback(process.wait)
            burners.callback(process.kill)
        figures = soak(cluster, seconds, random.Random(arguments.seed))
    Console().print_json(data=figures)
    aims = [
        Aim.of("workers lost that did not exit", len(figures["lost"]), 0, "lower"),
        Aim.of("failed requests", sum(figures["failed"].values()), 0, "lower"),
    ]
    finish(Report.of("stalled_host", figures, aims), arguments.json)


if __name__ == "__main__":
    main()
