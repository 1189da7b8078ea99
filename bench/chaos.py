"""A real cluster under load whose processes are killed, frozen and drained: `python -m bench.chaos --minutes 10`.

Two of each: proxies, prefill and decode workers. Requests come at a part of the measured capacity, one in ten of their
clients leaves early, and now and then many more come than there is room for: what is refused then is counted apart.
Every answer is compared, token for token, with that of transformers alone. At the end every block must be
free, and no process may have grown or kept descriptors, files or shared memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.chaos_clients import Clients, Question, make_questions
from bench.chaos_faults import CLUSTER_OPTIONS, WORKERS, Faults
from bench.noise_model import ensure_noise_model
from bench.process_memory import ProcessMemory, cluster_memory
from bench.reference_answers import ReferenceModel
from bench.report import Aim, Report, add_common_options, finish
from tests.faults.leaks import Footprint, shared_memory
from tests.faults.streams import wait_until
from tests.support.cluster import Cluster

LOAD = 0.8
NUM_AT_ONCE = 12
"""While the capacity is measured."""
MAX_WAITING = 64
BURST = 3 * MAX_WAITING
BURST_EVERY_S = 45.0
NUM_FIRST_BURSTS = 2
"""Before memory is first looked at: what as many at once need grows to its size at the first."""
MAX_GROWTH = 1.1
OPTIONS = (
    *CLUSTER_OPTIONS, "--proxies", "2", "--dtype", "float32", "--threads-per-worker", "1",
    "--kv-cache-gib", "0.1", "--max-waiting-requests", str(MAX_WAITING),
)  # fmt: skip


async def soak(
    cluster: Cluster, seconds: float, questions: list[Question], rng: random.Random, shared_before: set[str]
) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # so that every request may meet either proxy
    timeout = aiohttp.ClientTimeout(total=600)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            clients = Clients(session, cluster.url, questions, rng)
            task = progress.add_task("each request by itself", total=None)
            await clients.check_each()
            progress.update(task, description="measuring the capacity")
            capacity_per_s = await clients.capacity_per_s(min(20.0, seconds / 6), NUM_AT_ONCE)
            for _ in range(NUM_FIRST_BURSTS):
                await clients.first_burst(BURST)
            await asyncio.to_thread(cluster.wait_for, cluster.all_blocks_free, 60)
            memory = cluster_memory(cluster.port)
            footprint = Footprint.of(cluster, shared_before)
            end = time.monotonic() + seconds

            def on_strike(name: str, fault: str) -> None:
                clients.strikes.append((time.monotonic(), f"{name}: {fault}"))
                if fault == "SIGKILL" and name.startswith("proxy"):
                    clients.proxy_kills.append(time.monotonic())

            names = (*WORKERS, "proxy-0", "proxy-1")
            faults = Faults(cluster.port, 2, names, rng, progress.console.print, on_strike)
            progress.update(task, description=f"{LOAD * capacity_per_s:.1f} requests/s", total=seconds)
            await asyncio.gather(
                faults.run_while(lambda: time.monotonic() < end - 10),
                clients.arrive(LOAD * capacity_per_s, end),
                _bursts(clients, end, seconds),
                _show(progress, task, end),
            )
            progress.update(task, description="waiting for the last answers")
            await clients.wait()
    await asyncio.to_thread(cluster.wait_for, cluster.all_blocks_free, 60)
    leaks: list[str] = []

    def is_clean() -> bool:
        leaks[:] = Footprint.of(cluster, shared_before).leaked_since(footprint)
        return not leaks

    await asyncio.to_thread(wait_until, is_clean, 30)
    after = cluster_memory(cluster.port)
    return {
        "seconds": seconds,
        "load_average": round(os.getloadavg()[0], 2),
        "capacity_per_s": round(capacity_per_s, 2),
        "offered_per_s": round(LOAD * capacity_per_s, 2),
        **msgspec.to_builtins(clients.tally),
        "leaks": leaks,
        "memory_before": msgspec.to_builtins(memory),
        "memory_after": msgspec.to_builtins(after),
        "most_growth": round(most_growth(memory, after), 3),
        "faults": faults.told,
    }


async def _bursts(clients: Clients, end: float, seconds: float) -> None:
    every_s = min(BURST_EVERY_S, seconds / 3)
    while time.monotonic() + every_s < end:
        await asyncio.sleep(every_s)
        clients.burst(BURST)


async def _show(progress: Progress, task: Any, end: float) -> None:
    began_at = time.monotonic()
    while time.monotonic() < end:
        await asyncio.sleep(0.5)
        progress.update(task, completed=time.monotonic() - began_at)


def most_growth(before: dict[str, ProcessMemory], after: dict[str, ProcessMemory]) -> float:
    """The largest ratio of own memory, of processes of one name; another may bear it by now."""
    return max(after[name].own_mib / before[name].own_mib for name in before.keys() & after.keys())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=7)
    add_common_options(parser)
    arguments = parser.parse_args()
    seconds = 60.0 if arguments.quick else 60 * arguments.minutes
    shared_before = shared_memory()
    rng = random.Random(arguments.seed)
    questions = make_questions(rng, ReferenceModel(ensure_noise_model()))
    with Cluster(*OPTIONS, start_timeout_s=240) as cluster:
        figures = asyncio.run(soak(cluster, seconds, questions, rng, shared_before))
    Console().print_json(data={name: value for name, value in figures.items() if name != "faults"})
    aims = [
        Aim.of("wrong answers", figures["wrong"], 0, "lower"),
        Aim.of("failed requests", sum(figures["failed"].values()), 0, "lower"),
        Aim.of("leaked descriptors, files and segments", len(figures["leaks"]), 0, "lower"),
        Aim.of("own memory of a process at the end over that at the start, the most", figures["most_growth"],
               MAX_GROWTH, "lower"),
    ]  # fmt: skip
    finish(Report.of("chaos", figures, aims), arguments.json)


if __name__ == "__main__":
    main()
