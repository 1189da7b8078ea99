"""A real cluster whose workers are killed, frozen and drained under load: `python -m bench.chaos --minutes 10`.

Two prefill and two decode workers, one fault at a time, clients that leave in between. Every answer is compared, token
for token, with that of a run in which nothing happened. Reports wrong and lost answers, and how long the cluster took
to be whole again after each kind of fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import aiohttp

from bench.report import Aim, Report, add_common_options, finish
from deploy.status import fetch_status
from tests.cluster import Cluster

NUM_BODIES = 24
FROZEN_S = 5.0
RECOVERY_LIMIT_S = 300.0
FAULTS = ("SIGKILL", "SIGSTOP then SIGCONT", "SIGTERM")
ROLES = ("prefill", "decode")


def make_bodies(rng: random.Random) -> list[dict[str, Any]]:
    """Of all sizes; half greedy, half seeded; some with several sequences."""
    return [
        {
            "prompt": [rng.randrange(4, 2000) for _ in range(rng.choice([4, 60, 300, 900]))],
            "max_tokens": rng.choice([1, 20, 100, 300]),
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "n": rng.choice([1, 1, 1, 2]),
            "seed": number,
            "temperature": rng.choice([0, 0.9]),
        }
        for number in range(NUM_BODIES)
    ]


class Clients:
    """num_wrong: answers that differ. errors: codes of those that failed."""

    def __init__(self, session: aiohttp.ClientSession, url: str, bodies: list[dict[str, Any]], seed: int) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._bodies = bodies
        self._rng = random.Random(seed)
        self.expected: list[dict[int, list[int]]] = []
        self.num_right = self.num_wrong = self.num_left = 0
        self.errors: Counter[str] = Counter()
        self.longest_pause_s = 0.0

    async def learn(self) -> None:
        """What is right: each body by itself, while nothing happens."""
        for body in self._bodies:
            self.expected.append(await self._ask(body))

    async def run_until(self, end: float) -> None:
        while time.monotonic() < end:
            number = self._rng.randrange(len(self._bodies))
            asking = asyncio.create_task(self._ask(self._bodies[number]))
            leaves_after_s = self._rng.uniform(0, 2) if self._rng.random() < 0.15 else None
            done, _ = await asyncio.wait([asking], timeout=leaves_after_s)
            if not done:
                asking.cancel()
                await asyncio.wait([asking])
                self.num_left += 1
                continue
            try:
                answer = asking.result()
            except (aiohttp.ClientError, RuntimeError) as error:
                self.errors[str(error)[:100]] += 1
                continue
            if answer == self.expected[number]:
                self.num_right += 1
            else:
                self.num_wrong += 1

    async def _ask(self, body: dict[str, Any]) -> dict[int, list[int]]:
        """Token ids by choice. Raises RuntimeError for an error of the server."""
        tokens: dict[int, list[int]] = defaultdict(list)
        async with self._session.post(self._url, json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status} {(await answer.json())['error']['code']}")
            heard_at = time.monotonic()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                self.longest_pause_s = max(self.longest_pause_s, time.monotonic() - heard_at)
                heard_at = time.monotonic()
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RuntimeError(f"stream: {event['error']['code']}")
                for choice in event["choices"]:
                    tokens[choice["index"]] += choice.get("token_ids") or []
        return dict(tokens)


async def is_whole(port: int) -> bool:
    """Every worker is there, and every pair is ready."""
    report = (await fetch_status(port))[0]
    num_ready = sum(pair.state == "ready" for worker in report.workers for pair in worker.pairs)
    return len(report.workers) == 4 and num_ready == 4 and not any(worker.draining for worker in report.workers)


async def break_things(cluster: Cluster, end: float, rng: random.Random) -> list[dict[str, Any]]:
    """One fault after the other; each waits until the cluster is whole again."""
    told: list[dict[str, Any]] = []
    cases = [(role, fault) for fault in FAULTS for role in ROLES]
    while time.monotonic() < end:
        role, fault = cases[len(told) % len(cases)]
        worker_id = f"{role}-{rng.randrange(2)}"
        report = (await fetch_status(cluster.port))[0]
        before = next(each.worker for each in report.workers if each.worker.worker_id == worker_id)
        began_at = time.monotonic()
        os.kill(before.pid, getattr(signal, fault.split()[0]))
        if fault.startswith("SIGSTOP"):
            await asyncio.sleep(FROZEN_S)
            os.kill(before.pid, signal.SIGCONT)
        while True:
            await asyncio.sleep(0.2)
            epochs = {each.worker.epoch for each in (await fetch_status(cluster.port))[0].workers}
            if before.epoch not in epochs and await is_whole(cluster.port):
                break
            if time.monotonic() - began_at > RECOVERY_LIMIT_S:
                raise RuntimeError(f"the cluster was not whole within {RECOVERY_LIMIT_S:.0f} s after {fault}")
        told.append({"worker": worker_id, "fault": fault, "whole_again_s": round(time.monotonic() - began_at, 2)})
        print(json.dumps(told[-1]), flush=True)
        await asyncio.sleep(rng.uniform(1, 4))
    return told


async def soak(cluster: Cluster, seconds: float, num_clients: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        clients = Clients(session, cluster.url, make_bodies(rng), seed)
        await clients.learn()
        memory = {name: resident_mib(pid) for name, pid in proxies(cluster).items()}
        end = time.monotonic() + seconds
        faults, *_ = await asyncio.gather(
            break_things(cluster, end, rng), *(clients.run_until(end) for _ in range(num_clients))
        )
    await asyncio.to_thread(cluster.wait_for, cluster.all_blocks_free, 60)
    return {
        "seconds": seconds,
        "clients": num_clients,
        "load_average": os.getloadavg()[0],
        "right": clients.num_right,
        "wrong": clients.num_wrong,
        "left": clients.num_left,
        "errors": dict(clients.errors),
        "longest_pause_s": round(clients.longest_pause_s, 2),
        "proxy_mib_before": memory,
        "proxy_mib_after": {name: resident_mib(pid) for name, pid in proxies(cluster).items()},
        "faults": faults,
    }


def proxies(cluster: Cluster) -> dict[str, int]:
    """The proxy is the child that no worker is."""
    workers = {report.worker.pid for report in cluster.status().workers}
    return {f"proxy-{number}": pid for number, pid in enumerate(p for p in cluster.pids() if p not in workers)}


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=7)
    add_common_options(parser)
    arguments = parser.parse_args()
    seconds = 20.0 if arguments.quick else 60 * arguments.minutes
    options = ("--prefill", "2", "--decode", "2", "--dtype", "float32", "--worker-wait-s", "240")
    with Cluster(*options, start_timeout_s=240) as cluster:
        figures = asyncio.run(soak(cluster, seconds, arguments.clients, arguments.seed))
    print(json.dumps({name: value for name, value in figures.items() if name != "faults"}, indent=2))
    aims = [
        Aim.of("wrong answers", figures["wrong"], 0, "lower"),
        Aim.of("failed requests", sum(figures["errors"].values()), 0, "lower"),
    ]
    finish(Report.of("chaos", figures, aims), arguments.json)


if __name__ == "__main__":
    main()
