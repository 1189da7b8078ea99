"""Large clusters of real workers and proxies in simulated time: what control costs, and how good decisions are.

    python -m bench.scale [--workers N --proxies N --seconds S] [--quick] [--json FILE]

Half of the workers compute prompts, half decode. Requests arrive as a Poisson process at random proxies, for `--load`
of what the prefill workers can compute. After a third of the time a zone fails: every fourth worker is killed at one
instant. From half of the time on, workers are drained and restarted one after the other.

CPU times are those of the thread while it runs the callbacks of a process, by what caused the callback: the message
that arrived, or else the first that was sent. Encoding is included. They contain the simulator's sockets instead of
ZeroMQ's. `--ideal` runs the same load through one router that sees each worker's load at the
moment of each decision.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import Any
from unittest.mock import patch

from bench.support.report import Report, add_common_options, finish
from tandem.protocol.messages.generation import SamplingParams, StopConditions
from tandem.protocol.messages.token_ids import pack_token_ids
from tandem.protocol.prefix_hash import BlockHasher, pack_short_hashes
from tandem.proxy.cluster.router import Router
from tandem.proxy.dispatch.sequence import DispatchedSequence
from tandem.proxy.text.prompt import Prompt
from tandem.runtime.errors import TandemError
from tandem.simulator.cluster import SimulatedCluster
from tandem.simulator.engine import StepTimes
from tandem.simulator.network import Connection
from tandem.simulator.processes import SimulatedProxy
from tandem.simulator.run import hidden_logs, seeded_ids
from tandem.simulator.scenario import ClusterShape, cluster_config
from tandem.simulator.timeline import ProcessLoop, Timeline

STEP_TIMES = StepTimes(fixed_s=0.02, per_prompt_token_s=0.01, per_sequence_s=0.002)
"""A prompt takes 0.2 to 0.6 s, as prompts of some thousand tokens do on a large model."""
MIN_PROMPT, MAX_PROMPT = 20, 60
NUM_OUTPUT = 6
MEAN_PROMPT_S = (
    STEP_TIMES.fixed_s + STEP_TIMES.per_sequence_s + STEP_TIMES.per_prompt_token_s * (MIN_PROMPT + MAX_PROMPT) / 2
)
START_LIMIT_S = 60.0


class Meter:
    """CPU seconds of callbacks by (process kind, cause), and messages by type."""

    def __init__(self) -> None:
        self.cpu_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.num_callbacks: Counter[tuple[str, str]] = Counter()
        self.num_messages: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self._cause = ""

    def clear(self) -> None:
        for each in (self.cpu_s, self.num_callbacks, self.num_messages, self.num_bytes):
            each.clear()

    @contextmanager
    def installed(self) -> Iterator[None]:
        run_handle, deliver, send = ProcessLoop.run_handle, Connection.deliver, Connection.send

        def metered_run(loop: ProcessLoop, handle: Any) -> None:
            self._cause = ""
            started = time.thread_time()
            run_handle(loop, handle)
            taken_s = time.thread_time() - started
            kind = "proxy" if loop.name.startswith("proxy") else "launcher" if loop.name == "launcher" else "worker"
            key = kind, self._cause or getattr(handle.callback, "__qualname__", "task")
            self.cpu_s[key] += taken_s
            self.num_callbacks[key] += 1

        def metered_deliver(connection: Connection, encoded: bytes, to_router: bool) -> None:
            self._cause = _tag(encoded)
            deliver(connection, encoded, to_router)

        def metered_send(connection: Connection, encoded: bytes, *, to_router: bool) -> bool:
            tag = _tag(encoded)
            self._cause = self._cause or f"sends {tag}"
            self.num_messages[tag] += 1
            self.num_bytes[tag] += len(encoded)
            return send(connection, encoded, to_router=to_router)

        with ExitStack() as stack:
            for owner, name, replacement in (
                (ProcessLoop, "run_handle", metered_run),
                (Connection, "deliver", metered_deliver),
                (Connection, "send", metered_send),
            ):
                stack.enter_context(patch.object(owner, name, replacement))
            yield


def _tag(encoded: bytes) -> str:
    """Returns the type of an encoded message, which is its first value."""
    at = encoded.index(b"\xa4type") + 5
    size = encoded[at] & 31
    return encoded[at + 1 : at + 1 + size].decode()


@dataclass
class Load:
    """Clients of all proxies. outcomes: ended requests by what they came to."""

    cluster: SimulatedCluster
    rng: random.Random
    requests_per_s: float
    outcomes: Counter[str] = field(default_factory=Counter)
    ttfts_s: list[float] = field(default_factory=list)
    num_sent: int = 0
    is_over: bool = False

    def begin(self) -> None:
        self.cluster.world.call_later(self.rng.expovariate(self.requests_per_s), self._next)

    def _next(self) -> None:
        if self.is_over:
            return
        self.begin()
        proxy = self.rng.choice(list(self.cluster.proxies.values()))
        token_ids = [self.rng.randrange(1, 50_000) for _ in range(self.rng.randint(MIN_PROMPT, MAX_PROMPT))]
        packed = pack_token_ids(token_ids)
        hashes = pack_short_hashes(BlockHasher(proxy.block_size, "simulated").prompt_hashes(packed))
        self.num_sent += 1
        proxy.loop.call_soon(self._start, proxy, Prompt(packed, len(token_ids), prefix_hashes=hashes))

    def _start(self, proxy: SimulatedProxy, prompt: Prompt) -> None:
        sent_at, has_begun = proxy.loop.time(), False

        def on_ready(sequence: DispatchedSequence) -> None:
            nonlocal has_begun
            try:
                delta = proxy.dispatcher.take(sequence)
            except TandemError as error:
                self.outcomes[error.code] += 1
                proxy.dispatcher.drop(sequence)
                return
            if delta is None:
                return
            if not has_begun and delta.tokens:
                has_begun = True
                self.ttfts_s.append(proxy.loop.time() - sent_at)
            if delta.finish_reason is not None:
                self.outcomes["finished"] += 1
                proxy.dispatcher.drop(sequence)

        def later(sequence: DispatchedSequence) -> None:
            proxy.loop.call_soon(on_ready, sequence)

        proxy.dispatcher.start(
            prompt, [SamplingParams(temperature=0.0)], StopConditions(NUM_OUTPUT), 600.0,
            later,
        )  # fmt: skip


@contextmanager
def ideal_decisions(cluster: Callable[[], SimulatedCluster]) -> Iterator[None]:
    """Lets routers see the load of each worker at the moment of each decision."""
    pick = Router.pick

    def informed(router: Router, *arguments: Any) -> Any:
        proxy = next(each for each in cluster().proxies.values() if each.router is router)
        for record in {id(r): r for r in proxy.table.prefill_workers + proxy.table.decode_workers}.values():
            record.use.on_report(cluster().workers[record.worker.worker_id].worker._load())
        return pick(router, *arguments)

    with patch.object(Router, "pick", informed):
        yield


def run(
    num_workers: int, num_proxies: int, seconds: float, load_share: float, has_faults: bool, is_ideal: bool = False
) -> dict[str, Any]:
    """Returns the figures of one cluster."""
    rng = random.Random(f"scale {num_workers} {num_proxies}")
    num_prefill = num_workers // 2
    config = cluster_config(prefill=num_prefill, decode=num_workers - num_prefill, proxies=num_proxies)
    shape = ClusterShape(config, num_blocks=64, step_times=STEP_TIMES, keeps_kv=False)
    meter, problems = Meter(), Counter[str]()
    timeline = Timeline(rng, lambda name, error: problems.update([f"{type(error).__name__}: {error}"]))
    rss_before = _rss_mib()
    with hidden_logs(), seeded_ids(rng), meter.installed(), ExitStack() as stack:
        cluster = SimulatedCluster(
            shape, timeline, rng, lambda rule, details: problems.update([rule]), lambda line: None
        )
        if is_ideal:
            stack.enter_context(ideal_decisions(lambda: cluster))
        started = time.monotonic()
        ready_at = _run_until_whole(cluster, timeline, num_workers, START_LIMIT_S)
        figures: dict[str, Any] = {
            "workers": num_workers,
            "proxies": num_proxies,
            "router": "ideal" if is_ideal else "reports",
            "faults": has_faults,
            "start": {
                "virtual_s": round(ready_at, 2),
                "real_s": round(time.monotonic() - started, 1),
                **_totals(meter),
            },
        }
        gc.collect()
        gc.freeze()
        figures["start"]["rss_mib"] = round(_rss_mib() - rss_before)
        meter.clear()
        begun, real = timeline.now, time.monotonic()
        load = Load(cluster, rng, load_share * num_prefill / MEAN_PROMPT_S)
        cluster.world.call_soon(load.begin)
        if has_faults:
            figures["zone_loss"] = _with_faults(cluster, timeline, load, begun, seconds, num_workers)
        else:
            timeline.run(lambda: False, begun + seconds)
        load.is_over = True
        timeline.run(lambda: sum(load.outcomes.values()) >= load.num_sent, timeline.now + 120.0)
        virtual_s = timeline.now - begun
        figures |= {
            "virtual_s": round(virtual_s, 1),
            "real_s": round(time.monotonic() - real, 1),
            "requests": load.num_sent,
            "outcomes": dict(load.outcomes) | {"unfinished": load.num_sent - sum(load.outcomes.values())},
            "ttft_ms": _percentiles(load.ttfts_s),
            "problems": dict(problems),
            "rss_mib": round(_rss_mib() - rss_before),
            **_totals(meter),
            **_costs(meter, load.num_sent, virtual_s, num_workers, num_proxies),
        }
        for loop in timeline.loops:
            loop.discard()
    return figures


def _with_faults(
    cluster: SimulatedCluster, timeline: Timeline, load: Load, begun: float, seconds: float, num_workers: int
) -> dict[str, Any]:
    timeline.run(lambda: False, begun + seconds / 3)
    zone = list(cluster.workers.values())[::4]
    num_before, killed_at = len(load.ttfts_s), timeline.now
    for worker in zone:
        cluster.world.call_soon(worker.exit)
    whole_at = _run_until_whole(cluster, timeline, num_workers, begun + seconds / 2)
    num_after = len(load.ttfts_s)
    timeline.run(lambda: False, begun + seconds / 2)
    interval_s = seconds / 2 / num_workers
    for number, name in enumerate(cluster.workers):
        cluster.world.call_later(number * interval_s, cluster.launcher.launcher.restart, name)
    timeline.run(lambda: False, begun + seconds)
    return {
        "workers": len(zone),
        "whole_again_s": round(whole_at - killed_at, 2),
        "ttft_ms_meanwhile": _percentiles(load.ttfts_s[num_before:num_after]),
    }


def _run_until_whole(cluster: SimulatedCluster, timeline: Timeline, num_workers: int, deadline: float) -> float:
    """Runs until all proxies know all workers and their pairs. Returns the time."""

    def is_whole() -> bool:
        return len(cluster.proxies) > 0 and all(
            not proxy.loop.is_dead and hasattr(proxy, "table")
            and len(proxy.table.prefill_workers + proxy.table.decode_workers) == num_workers
            and proxy.table.paired_prefill_workers and proxy.table.pair_trouble() is None
            and all(record.decode_peers for record in proxy.table.prefill_workers)
            for proxy in cluster.proxies.values()
        )  # fmt: skip

    while timeline.now < deadline:
        timeline.run(lambda: False, timeline.now + 0.25)
        if is_whole():
            return timeline.now
    return math.inf


def _percentiles(times_s: list[float]) -> dict[str, float]:
    ordered = sorted(times_s) or [math.nan]
    picked = {"mean": mean(ordered), "p50": ordered[len(ordered) // 2], "p99": ordered[int(0.99 * len(ordered))]}
    return {name: round(1000 * value, 1) for name, value in picked.items()}


def _totals(meter: Meter) -> dict[str, Any]:
    return {
        "messages": sum(meter.num_messages.values()),
        "bytes": sum(meter.num_bytes.values()),
        "by_type": {name: [count, meter.num_bytes[name]] for name, count in meter.num_messages.most_common()},
    }


_CONTROL = {
    "WorkerStatus", "ClusterView", "RegisterWorker", "WorkerLeft", "WorkerExited", "sends WorkerStatus",
    "sends ClusterView", "sends RegisterWorker", "sends WorkerLeft",
}  # fmt: skip
_REQUESTS = {
    "StartPrefill", "PrepareDecode", "AbortAttempt", "AbortAllAttempts", "FirstToken", "DecodeReserved", "TokenBatch",
    "AttemptFailed", "AttemptPreempted", "ReserveKV", "KVReserved", "KVRefused", "ShipKV", "FinishTransfer",
    "CloseTransfer",
}  # fmt: skip
_REQUEST_CALLBACKS = ("Load.", "SimulatedEngine.", "KVTraffic.", "Sender.", "Receiver.")


def _costs(meter: Meter, num_requests: int, virtual_s: float, num_workers: int, num_proxies: int) -> dict[str, Any]:
    """Returns CPU time by process kind: per request, per report, and as a share of a core."""
    costs: dict[str, Any] = {}
    for kind, number in (("proxy", num_proxies), ("worker", num_workers)):
        by_cause = {cause: seconds for (each, cause), seconds in meter.cpu_s.items() if each == kind}
        control_s = sum(seconds for cause, seconds in by_cause.items() if cause in _CONTROL)
        request_s = sum(
            seconds
            for cause, seconds in by_cause.items()
            if cause.removeprefix("sends ") in _REQUESTS or cause.startswith(_REQUEST_CALLBACKS)
        )
        num_reports = max(1, meter.num_messages["WorkerStatus"])
        costs[kind] = {
            "core_share": round(sum(by_cause.values()) / virtual_s / number, 4),
            "control_core_share": round(control_s / virtual_s / number, 4),
            "us_per_request": round(1e6 * request_s / max(1, num_requests), 1),
            "us_per_report": round(1e6 * control_s / num_reports, 1),
            "by_cause": {
                cause: [meter.num_callbacks[kind, cause], round(seconds, 3)]
                for cause, seconds in sorted(by_cause.items(), key=lambda item: -item[1])[:15]
            },
        }
    costs["messages_per_s"] = round(sum(meter.num_messages.values()) / virtual_s)
    costs["reports_per_s"] = round(meter.num_messages["WorkerStatus"] / virtual_s)
    costs["control_bytes_per_s"] = round(
        sum(size for name, size in meter.num_bytes.items() if name in _CONTROL) / virtual_s
    )
    return costs


def _rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    add_common_options(parser)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--proxies", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0, help="virtual time under load")
    parser.add_argument("--load", type=float, default=0.5, help="share of what the prefill workers can compute")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--ideal", action="store_true", help="one router that sees all loads at once")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.workers, arguments.proxies, arguments.seconds = 16, 2, 20.0
    figures = run(
        arguments.workers,
        arguments.proxies,
        arguments.seconds,
        arguments.load,
        not arguments.no_faults,
        arguments.ideal,
    )
    print(json.dumps(figures, indent=1))
    finish(Report.of("scale", {"runs": [figures]}), arguments.json)


if __name__ == "__main__":
    main()
