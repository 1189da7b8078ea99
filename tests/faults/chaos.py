"""Soak test: load on a real cluster while its processes are killed, frozen and drained.

    python -m tests.faults.chaos [--minutes 10] [--seed N] [--change-roles] [--quick] [--json FILE]

Two proxies, two prefill and two decode workers. Requests arrive at 80 % of the measured capacity, one client in ten
disconnects early, and bursts exceed the waiting limit. With --change-roles, a random worker gets a random role every
second. Every token and log-probability is compared, bit for bit, with those of a process that computes each sequence
alone, in bfloat16.
At the end all blocks must be free, and no process may have leaked memory, descriptors, files or shared memory.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.support.report import Aim, Report, finish, new_parser
from tests.faults.chaos_clients import ChaosQuestion, Clients, make_questions
from tests.faults.fault_injector import CLUSTER_OPTIONS, WORKERS, FaultInjector
from tests.faults.leaks import Footprint, shared_memory
from tests.support.cluster import Cluster
from tests.support.exact_engine import exact_engine
from tests.support.noise_model import ensure_noise_model
from tests.support.processes import ProcessMemory, cluster_memory
from tests.support.waiting import comes_true

LOAD = 0.8
NUM_AT_ONCE = 12
"""Requests in flight while the capacity is measured."""
MAX_WAITING = 64
BURST = 3 * MAX_WAITING
BURST_EVERY_S = 45.0
NUM_WARM_UP_BURSTS = 2
"""Bursts before the first memory reading, so that buffers have reached their size."""
MAX_GROWTH = 1.1
OPTIONS = (
    *CLUSTER_OPTIONS, "--proxies", "2", "--dtype", "bfloat16", "--threads-per-worker", "1",
    "--kv-cache-gib", "0.1", "--max-waiting-requests", str(MAX_WAITING),
)  # fmt: skip

SMALL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""By default oneDNN and torch each keep the code of the last 1,024 products, one for each number of rows. In bfloat16
that is up to a gigabyte, which grows for many minutes and would hide a leak."""


async def soak(
    cluster: Cluster,
    seconds: float,
    questions: list[ChaosQuestion],
    rng: random.Random,
    shared_before: set[str],
    change_roles: bool,
) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # lets each request reach either proxy
    timeout = aiohttp.ClientTimeout(total=600)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            clients = Clients(session, cluster.url, questions, rng)
            names = (*WORKERS, "proxy-0", "proxy-1")
            injector = FaultInjector(cluster.port, 2, names, rng, progress.console.print, clients.on_fault)
            if change_roles:
                await injector.make_all_elastic()
            task = progress.add_task("checking each request alone", total=None)
            await clients.check_each()
            progress.update(task, description="measuring the capacity")
            capacity_per_s = await clients.capacity_per_s(min(20.0, seconds / 6), NUM_AT_ONCE)
            for _ in range(NUM_WARM_UP_BURSTS):
                await clients.warm_up_burst(BURST)
            await asyncio.to_thread(cluster.wait_for, cluster.all_blocks_free, 60)
            memory = cluster_memory(cluster.port)
            footprint = Footprint.of(cluster, shared_before)
            end = time.monotonic() + seconds

            progress.update(task, description=f"{LOAD * capacity_per_s:.1f} requests/s", total=seconds)
            await asyncio.gather(
                injector.run_while(lambda: time.monotonic() < end - 10),
                clients.send_at_rate(LOAD * capacity_per_s, end),
                _bursts(clients, end, seconds),
                _show(progress, task, end),
                injector.change_roles_while(lambda: change_roles and time.monotonic() < end - 5),
            )
            progress.update(task, description="waiting for the last responses")
            await clients.wait()
    await asyncio.to_thread(cluster.wait_for, cluster.all_blocks_free, 60)
    leaks: list[str] = []

    def is_clean() -> bool:
        leaks[:] = Footprint.of(cluster, shared_before).leaked_since(footprint)
        return not leaks

    await asyncio.to_thread(comes_true, is_clean, 30)
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
        "max_growth": round(max_growth(memory, after), 3),
        "role_changes": injector.num_role_changes,
        "faults": injector.injected,
    }


async def _bursts(clients: Clients, end: float, seconds: float) -> None:
    every_s = min(BURST_EVERY_S, seconds / 3)
    while time.monotonic() + every_s < end:
        await asyncio.sleep(every_s)
        clients.burst(BURST)


async def _show(progress: Progress, task: Any, end: float) -> None:
    started_at = time.monotonic()
    while time.monotonic() < end:
        await asyncio.sleep(0.5)
        progress.update(task, completed=time.monotonic() - started_at)


def max_growth(before: dict[str, ProcessMemory], after: dict[str, ProcessMemory]) -> float:
    """Returns the largest growth ratio of own memory by process name; the process itself may have been replaced."""
    return max(after[name].own_mib / before[name].own_mib for name in before.keys() & after.keys())


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--change-roles", action="store_true")
    arguments = parser.parse_args()
    seconds = 60.0 if arguments.quick else 60 * arguments.minutes
    shared_before = shared_memory()
    rng = random.Random(arguments.seed)
    engine = exact_engine(ensure_noise_model())
    questions = make_questions(rng, engine)
    engine.close()
    with Cluster(*OPTIONS, start_timeout_s=240, env=SMALL_CACHES) as cluster:
        figures = asyncio.run(soak(cluster, seconds, questions, rng, shared_before, arguments.change_roles))
    Console().print_json(data={name: value for name, value in figures.items() if name != "faults"})
    aims = [
        Aim.of("wrong responses", figures["wrong"], 0, "lower"),
        Aim.of("failed requests", sum(figures["failed"].values()), 0, "lower"),
        Aim.of("leaked descriptors, files and segments", len(figures["leaks"]), 0, "lower"),
        Aim.of("largest growth of a process's own memory, end / start", figures["max_growth"], MAX_GROWTH, "lower"),
    ]  # fmt: skip
    finish(Report.of("chaos", figures, aims), arguments.json)


if __name__ == "__main__":
    main()
