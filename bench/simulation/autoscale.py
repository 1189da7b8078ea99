"""Goodput and worker-hours of the planner compared with fixed numbers of workers, in simulated time.

    python -m bench.simulation.autoscale [--trace FILE] [--quick] [--json FILE]

The traces `bursty`, `diurnal` and `shifting` (long prompts with short outputs, then the reverse) are synthetic and
seeded. --trace reads a recorded one (`deploy.planning.trace`). Prefixes that its prompts share are ignored.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any, Protocol

from bench.simulation.cluster import ClusterSimulation, Speeds
from bench.simulation.foresight import Foresight
from bench.support.report import Aim, Report, add_common_options, finish
from tandem.deploy.autoscale.demand import Demand, DemandMeter
from tandem.deploy.autoscale.planner import Planner, PlannerConfig, Proposal
from tandem.deploy.planning.player import TraceRequest
from tandem.deploy.planning.trace import read_trace
from tandem.protocol.messages.membership import WorkerInfo, WorkerLoad

TTFT_S = 1.0
ITL_S = 0.05
MAX_TOKENS = 1 << 20
"""Of a request of a recorded trace."""
MIN_GOODPUT = 0.95
"""Aim for goodput relative to the best fixed numbers of workers."""


def bursty(
    rng: random.Random, duration_s: float = 3600.0, base_per_s: float = 4.0, burst_per_s: float = 20.0
) -> list[TraceRequest]:
    """Low load with bursts of 2 to 5 minutes."""
    bursts = []
    at = rng.uniform(200, 400)
    while at < duration_s:
        bursts.append((at, at + rng.uniform(120, 300)))
        at = bursts[-1][1] + rng.uniform(300, 700)
    return _poisson(
        rng,
        duration_s,
        burst_per_s,
        lambda now: burst_per_s if any(begin <= now < end for begin, end in bursts) else base_per_s,
        lambda now: (1500.0, 200.0),
    )


def diurnal(
    rng: random.Random, duration_s: float = 3600.0, least_per_s: float = 2.0, most_per_s: float = 20.0
) -> list[TraceRequest]:
    """A sine with a period of one hour, like a compressed day."""

    def rate(now: float) -> float:
        return least_per_s + (most_per_s - least_per_s) * 0.5 * (1 - math.cos(2 * math.pi * now / duration_s))

    return _poisson(rng, duration_s, most_per_s, rate, lambda now: (1500.0, 200.0))


def shifting(rng: random.Random, duration_s: float = 3600.0, per_s: float = 10.0) -> list[TraceRequest]:
    """4,000 prompt and 60 output tokens for half of the time, then 400 and 600, which reverses the best ratio."""
    return _poisson(
        rng,
        duration_s,
        per_s,
        lambda now: per_s,
        lambda now: (4000.0, 60.0) if now < duration_s / 2 else (400.0, 600.0),
    )


def _poisson(rng: random.Random, duration_s: float, most_per_s: float, rate: Any, sizes: Any) -> list[TraceRequest]:
    """Draws arrivals by thinning (Lewis and Shedler, 1979) and log-normal sizes."""
    found = []
    now = 0.0
    while (now := now + rng.expovariate(most_per_s)) < duration_s:
        if rng.random() * most_per_s < rate(now):
            prompt, output = sizes(now)
            found.append(TraceRequest(now, _size(rng, prompt), _size(rng, output)))
    return found


def _size(rng: random.Random, mean: float, sigma: float = 0.5) -> int:
    return max(1, int(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))


class Proposes(Protocol):
    """Interface of a planner."""

    def propose(self, now: float, demand: Demand, num_prefill: int, num_decode: int, num_any: int = 0) -> Proposal: ...


def play(
    trace: list[TraceRequest],
    speeds: Speeds,
    num_prefill: int,
    num_decode: int,
    planner: Proposes | None,
    ttft_slo_s: float = math.inf,
    num_any: int = 0,
) -> dict[str, Any]:
    """Plays a trace and returns a row of figures. Without a planner the numbers of workers are fixed."""
    cluster = ClusterSimulation(speeds, num_prefill, num_decode, ttft_slo_s, num_any)
    meter = DemandMeter(speeds.max_num_seqs)

    def on_tick(now: float, loads: list[tuple[WorkerInfo, WorkerLoad]]) -> None:
        if planner is not None:
            demand = meter.observe(now, loads, cluster.num_refused)
            proposal = planner.propose(now, demand, *cluster.counts.values())
            cluster.scale({"prefill": proposal.prefill, "decode": proposal.decode, "any": proposal.any})

    cluster.run(trace, on_tick)
    assert len(cluster.served) + cluster.num_refused == len(trace)
    ttfts = sorted(served.ttft_s for served in cluster.served)
    itls = sorted(served.itl_s for served in cluster.served)
    num_good = sum(served.ttft_s <= TTFT_S and served.itl_s <= ITL_S for served in cluster.served)
    return {
        "requests": len(trace),
        "goodput": round(num_good / len(trace), 4),
        "refused": round(cluster.num_refused / len(trace), 4),
        "ttft_ms_p50": round(1000 * ttfts[len(ttfts) // 2]),
        "ttft_ms_p99": round(1000 * ttfts[int(0.99 * len(ttfts))]),
        "itl_ms_p99": round(1000 * itls[int(0.99 * len(itls))], 1),
        "worker_hours": round(cluster.worker_s / 3600, 2),
        "most_workers": cluster.max_workers,
        "requests_per_worker_hour": round(num_good / (cluster.worker_s / 3600)),
        "changes": cluster.num_changes,
        "moves": cluster.num_moves,
        "starts": cluster.num_starts,
    }


def planner_for(speeds: Speeds, max_workers: int, least: int = 1) -> Planner:
    config = PlannerConfig(
        ttft_s=TTFT_S,
        itl_s=ITL_S,
        min_prefill=least,
        min_decode=least,
        max_workers=max_workers,
        max_num_seqs=speeds.max_num_seqs,
        foresee_s=speeds.boot_s,
    )
    return Planner(config)


def aims(rows: list[dict[str, Any]]) -> list[Aim]:
    """Compares the best planner with the best fixed numbers on each trace: equal goodput at 20 % fewer worker-hours.

    The best planner has the fewest hours among those that keep the goodput, or else the highest goodput.
    """
    found = []
    for trace in dict.fromkeys(row["trace"] for row in rows):
        best = max((r for r in rows if r["trace"] == trace and r["workers"].startswith("fixed")), key=_goodput)
        planners = [r for r in rows if r["trace"] == trace and r["workers"].startswith("planner")]
        good = [r for r in planners if r["goodput"] >= MIN_GOODPUT * best["goodput"]]
        planned = min(good, key=lambda r: float(r["worker_hours"])) if good else max(planners, key=_goodput)
        goodput, hours = (planned[key] / best[key] for key in ("goodput", "worker_hours"))
        found.append(Aim.of(f"{trace}: goodput / best fixed", goodput, MIN_GOODPUT, "higher"))
        found.append(Aim.of(f"{trace}: worker-hours / best fixed", hours, 0.8, "lower"))
    return found


def _goodput(row: dict[str, Any]) -> tuple[float, float]:
    """Sort key: goodput, then fewer worker-hours."""
    return row["goodput"], -row["worker_hours"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.simulation.autoscale", description=__doc__.splitlines()[0])
    add_common_options(parser)
    parser.add_argument("--trace", type=Path, default=None, help="recorded trace to play instead of the synthetic ones")
    parser.add_argument("--seed", type=int, default=1, help="seed of the synthetic traces")
    parser.add_argument("--max-workers", type=int, default=10)
    arguments = parser.parse_args()
    speeds = Speeds()
    if arguments.trace is not None:
        traces = {arguments.trace.stem: read_trace(arguments.trace, MAX_TOKENS)}
    else:
        makers = (shifting,) if arguments.quick else (bursty, diurnal, shifting)
        traces = {make.__name__: make(random.Random(arguments.seed)) for make in makers}
    rows = []
    for name, trace in traces.items():
        most = arguments.max_workers
        fixed = [(2, 2), (most // 2, most - most // 2), (most - 4, 4), (4, most - 4)]
        variants: list[tuple[str, int, int, int, Proposes | None, float]] = []
        for refuses, slo_s in (("", math.inf), (", late ones refused", TTFT_S)):
            variants += [(f"fixed {p}P{d}D{refuses}", p, d, 0, None, slo_s) for p, d in fixed]
            variants.append((f"fixed {most} elastic{refuses}", 0, 0, most, None, slo_s))
            variants.append((f"planner{refuses}", 1, 1, 0, planner_for(speeds, most), slo_s))
            variants.append((f"planner, elastic{refuses}", 0, 0, 2, planner_for(speeds, most), slo_s))
            variants.append((f"planner, 3P3D at least{refuses}", 3, 3, 0, planner_for(speeds, most, least=3), slo_s))
        foresight = Foresight(trace, speeds, planner_for(speeds, most).config)
        variants.append(("foresight", *foresight.at_start, 0, foresight, math.inf))
        for label, num_prefill, num_decode, num_any, planner, slo_s in variants:
            figures = play(trace, speeds, num_prefill, num_decode, planner, slo_s, num_any)
            row = {"trace": name, "workers": label, **figures}
            rows.append(row)
            print(json.dumps(row), flush=True)
    settings = {
        "ttft_s": TTFT_S,
        "itl_s": ITL_S,
        "max_workers": arguments.max_workers,
        "seed": arguments.seed,
        "speeds": vars(speeds),
    }
    finish(Report.of("simulation.autoscale", {"settings": settings, "rows": rows}, aims(rows)), arguments.json)


if __name__ == "__main__":
    main()
