"""Large clusters of real workers and proxies in simulated time: what control costs, and how good decisions are.

    python -m bench.scale [--workers N --prefill N --proxies N --seconds S] [--quick] [--json FILE]

Half of the workers compute prompts unless `--prefill` gives a number; the others decode. Requests arrive as a Poisson
process, at each proxy in turn, for `--load` of what the prefill workers can compute. After a third of the time a zone
fails: every fourth worker is killed at one instant. From half of the time on, workers are drained and restarted one
after the other in random order, at most `--restarts-per-s`.

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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from bench.support.report import Report, finish, new_parser
from tandem.deploy.planning.player import Player, TraceRequest, spread_ms
from tandem.proxy.cluster.router import Router
from tandem.simulator.cluster import SimulatedCluster
from tandem.simulator.network import Connection
from tandem.simulator.scenario import ClusterShape, SimulatedStepTimes, cluster_config
from tandem.simulator.timeline import ProcessLoop

STEP_TIMES = SimulatedStepTimes(fixed_s=0.02, per_prompt_token_s=0.01, per_sequence_s=0.002)
"""A prompt takes 0.2 to 0.6 s, as prompts of some thousand tokens do on a large model."""
MIN_PROMPT, MAX_PROMPT = 20, 60
NUM_OUTPUT = 6
MEAN_PROMPT_S = (
    STEP_TIMES.fixed_s + STEP_TIMES.per_sequence_s + STEP_TIMES.per_prompt_token_s * (MIN_PROMPT + MAX_PROMPT) / 2
)


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


def arrivals(rng: random.Random, per_s: float, seconds: float) -> list[TraceRequest]:
    found, at = [], rng.expovariate(per_s)
    while at < seconds:
        found.append(TraceRequest(at, rng.randint(MIN_PROMPT, MAX_PROMPT), NUM_OUTPUT))
        at += rng.expovariate(per_s)
    return found


@contextmanager
def ideal_decisions(cluster: SimulatedCluster) -> Iterator[None]:
    """Lets routers see the load of each worker at the moment of each decision."""
    pick = Router.pick

    def informed(router: Router, *arguments: Any) -> Any:
        proxy = next(each for each in cluster.proxies.values() if each.router is router)
        for record in {id(r): r for r in proxy.table.prefill_workers + proxy.table.decode_workers}.values():
            record.use.on_report(cluster.workers[record.worker.worker_id].load())
        return pick(router, *arguments)

    with patch.object(Router, "pick", informed):
        yield


class Faults:
    """A zone that fails after a third of the time, and a rolling restart from half of it on."""

    def __init__(self, player: Player, seconds: float, max_restarts_per_s: float) -> None:
        self._player, world = player, player.cluster.world
        self.lost_at, self.whole_at = seconds / 3, math.inf
        self._num_pairs_at_start = self._num_pairs()
        world.call_later(self.lost_at, self._lose_a_zone)
        names = random.Random("restarts").sample(list(player.cluster.workers), len(player.cluster.workers))
        interval_s = max(1 / max_restarts_per_s, seconds / 2 / len(names))
        self.num_restarts = min(len(names), int(seconds / 2 / interval_s))
        for number, name in enumerate(names[: self.num_restarts]):
            at = seconds / 2 + number * interval_s
            world.call_later(at, self._restart, name)

    def _restart(self, name: str) -> None:
        launcher = self._player.cluster.launcher.launcher
        for process in launcher.processes:
            if process.name == name:
                launcher.restart(name, process.num_starts)

    def _lose_a_zone(self) -> None:
        for worker in list(self._player.cluster.workers.values())[::4]:
            worker.exit()
        self._player.cluster.world.call_later(0.25, self._look)

    def _num_pairs(self) -> int:
        """Number of ready pairs that every proxy knows."""
        tables = [proxy.table for proxy in self._player.cluster.proxies.values()]
        return min(sum(len(record.decode_peers) for record in table.prefill_workers) for table in tables)

    def _look(self) -> None:
        """Notes when all pairs are ready again."""
        if self._num_pairs() == self._num_pairs_at_start:
            self.whole_at = self._player.now
        else:
            self._player.cluster.world.call_later(0.25, self._look)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one cluster."""
    rng = random.Random(f"scale {options.workers} {options.proxies}")
    num_prefill = options.prefill or options.workers // 2
    config = cluster_config(prefill=num_prefill, decode=options.workers - num_prefill, proxies=options.proxies)
    shape = ClusterShape(config, num_blocks=64, step_times=STEP_TIMES, keeps_kv=False)
    trace = arrivals(rng, options.load * num_prefill / MEAN_PROMPT_S, options.seconds)
    meter, rss_before, started = Meter(), _rss_mib(), time.monotonic()
    with meter.installed(), ExitStack() as stack:
        player = Player(trace, shape)
        if options.ideal:
            stack.enter_context(ideal_decisions(player.cluster))
        start = {"real_s": round(time.monotonic() - started, 1), **_totals(meter)}
        gc.collect()
        gc.freeze()
        start["rss_mib"] = round(_rss_mib() - rss_before)
        meter.clear()
        faults, real = (
            None if options.no_faults else Faults(player, options.seconds, options.restarts_per_s),
            time.monotonic(),
        )
        played = player.play()
    figures = {
        "workers": options.workers,
        "prefill": num_prefill,
        "proxies": options.proxies,
        "router": "ideal" if options.ideal else "reports",
        "start": start,
        "virtual_s": round(player.now, 1),
        "real_s": round(time.monotonic() - real, 1),
        **played.summary(),
        "rss_mib": round(_rss_mib() - rss_before),
        **_totals(meter),
        **_costs(meter, player.now, options.workers, options.proxies),
    }
    if faults is not None:
        meanwhile = [each.ttft_s for each in played.served if faults.lost_at < each.sent_at < faults.whole_at]
        figures["restarts"] = faults.num_restarts
        figures["zone_loss"] = {
            "whole_again_s": round(faults.whole_at - faults.lost_at, 2), "ttft_ms_meanwhile": spread_ms(meanwhile)
        }  # fmt: skip
    return figures


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


def _costs(meter: Meter, virtual_s: float, num_workers: int, num_proxies: int) -> dict[str, Any]:
    """Returns CPU time by process kind: per report, and as a share of a core."""
    costs: dict[str, Any] = {}
    for kind, number in (("proxy", num_proxies), ("worker", num_workers)):
        by_cause = {cause: seconds for (each, cause), seconds in meter.cpu_s.items() if each == kind}
        control_s = sum(seconds for cause, seconds in by_cause.items() if cause in _CONTROL)
        num_reports = max(1, meter.num_messages["WorkerStatus"])
        costs[kind] = {
            "core_share": round(sum(by_cause.values()) / virtual_s / number, 4),
            "control_core_share": round(control_s / virtual_s / number, 4),
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
    parser = new_parser(__doc__)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--prefill", type=int, default=0, help="workers that compute prompts; 0 for half of them")
    parser.add_argument("--proxies", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0, help="virtual time under load")
    parser.add_argument("--load", type=float, default=0.5, help="share of what the prefill workers can compute")
    parser.add_argument("--restarts-per-s", type=float, default=10.0, help="at most")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--ideal", action="store_true", help="one router that sees all loads at once")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.workers, arguments.proxies, arguments.seconds = 16, 2, 20.0
    figures = run(arguments)
    print(json.dumps(figures, indent=1))
    finish(Report.of("scale", {"runs": [figures]}), arguments.json)


if __name__ == "__main__":
    main()
