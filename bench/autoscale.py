"""Goodput and worker-hours of the planner compared with fixed numbers of workers: real code in simulated time.

    python -m bench.autoscale [--trace FILE] [--quick] [--json FILE]

The launcher, its planner, workers and proxies are the product's; workers take the times of `WORKER` for their steps and
10 s to start. The traces `bursty`, `diurnal` and `shifting` (long prompts with short outputs, then the reverse) are
synthetic and seeded. --trace reads a recorded one (`deploy.planning.trace`).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.support.report import Aim, Report, finish, new_parser
from tandem.deploy.cluster_config import ClusterConfig, with_device_defaults
from tandem.deploy.planning.player import Player, TraceRequest
from tandem.deploy.planning.trace import read_trace
from tandem.deploy.planning.worker_figures import WorkerFigures, planned_shape
from tandem.runtime.settings import with_values

WORKER = WorkerFigures(
    prompt_tokens_per_s=1000.0, fixed_step_s=0.05, step_s_per_sequence=0.004, num_blocks=512, block_size=64,
    max_model_len=8192, kv_s_per_token=0.00001, start_s=10.0,
)  # fmt: skip
TTFT_MS, ITL_MS = 4000, 200
MIN_GOODPUT = 0.95
"""Aim for goodput relative to the best fixed numbers of workers."""

Sizes = tuple[float, float]
"""Mean tokens of prompts and answers."""


def bursty(rng: random.Random, duration_s: float) -> list[TraceRequest]:
    """Low load with bursts of a fifth of the time to a half of it."""
    bursts, at = [], 0.1 * duration_s
    while at < duration_s:
        bursts.append((at, at + rng.uniform(0.08, 0.2) * duration_s))
        at = bursts[-1][1] + rng.uniform(0.15, 0.3) * duration_s

    def rate(now: float) -> float:
        return 2.0 if any(begin <= now < end for begin, end in bursts) else 0.4

    return _poisson(rng, duration_s, 2.0, rate, lambda now: (1000.0, 60.0))


def diurnal(rng: random.Random, duration_s: float) -> list[TraceRequest]:
    """A sine, like a compressed day."""

    def rate(now: float) -> float:
        return 0.2 + 1.8 * 0.5 * (1 - math.cos(2 * math.pi * now / duration_s))

    return _poisson(rng, duration_s, 2.0, rate, lambda now: (1000.0, 60.0))


def shifting(rng: random.Random, duration_s: float) -> list[TraceRequest]:
    """Long prompts with short answers for half of the time, then the reverse, which reverses the best ratio."""

    def sizes(now: float) -> Sizes:
        return (1600.0, 20.0) if now < duration_s / 2 else (250.0, 250.0)

    return _poisson(rng, duration_s, 1.6, lambda now: 1.6, sizes)


def _poisson(
    rng: random.Random,
    duration_s: float,
    most_per_s: float,
    rate: Callable[[float], float],
    sizes: Callable[[float], Sizes],
) -> list[TraceRequest]:  # fmt: skip
    """Draws arrivals by thinning (Lewis and Shedler, 1979) and log-normal sizes."""
    found, now = [], 0.0
    while (now := now + rng.expovariate(most_per_s)) < duration_s:
        if rng.random() * most_per_s < rate(now):
            prompt, output = sizes(now)
            found.append(TraceRequest(now, _size(rng, prompt), _size(rng, output)))
    return found


def _size(rng: random.Random, mean: float, sigma: float = 0.5) -> int:
    drawn = int(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))
    return min(max(1, drawn), WORKER.max_model_len // 2)


def measure(trace: list[TraceRequest], config: ClusterConfig) -> dict[str, Any]:
    """Plays a trace and returns a row of figures."""
    player = Player(trace, planned_shape(WORKER, with_device_defaults(config, on_gpus=False)))
    world, workers = player.cluster.world, player.cluster.workers
    worker_s, names = [0], set(workers)

    def count() -> None:
        names.update(workers)
        worker_s.append(len(workers))
        if player.now < trace[-1].at:
            world.call_later(1.0, count)

    world.call_soon(count)
    summary = player.play().summary(TTFT_MS / 1000, ITL_MS / 1000)
    assert set(summary["errors"]) <= {"ttft_slo_unreachable"}, summary["errors"]
    good = summary["goodput"] * len(trace)
    return {
        "requests": len(trace),
        "goodput": summary["goodput"],
        "refused": round(sum(summary["errors"].values()) / len(trace), 4),
        "ttft_ms_p50": summary["ttft_ms"]["p50"],
        "ttft_ms_p99": summary["ttft_ms"]["p99"],
        "tpot_ms_p99": summary["tpot_ms"]["p99"],
        "worker_hours": round(sum(worker_s) / 3600, 3),
        "requests_per_worker_hour": round(good / (sum(worker_s) / 3600)),
        "most_workers": max(worker_s),
        "started": len(names),
    }


def layouts(most: int) -> dict[str, ClusterConfig]:
    """Returns clusters with fixed numbers of workers and with a planner, which may have as many."""
    fixed = [(most - 2, 2), (most // 2, most - most // 2)]
    found = {f"fixed {prefill}P{decode}D": _config(prefill=prefill, decode=decode) for prefill, decode in fixed}
    found[f"fixed {most} elastic"] = _config(prefill=0, decode=0, workers=most)
    planned: dict[str, Any] = {"autoscale": True, "autoscale_max_workers": most}
    found["planner"] = _config(**planned)
    found["planner, late ones refused"] = _config(**planned, ttft_slo_ms=TTFT_MS)
    found["planner, elastic"] = _config(**planned, prefill=0, decode=0, workers=2)
    return found


def _config(**settings: Any) -> ClusterConfig:
    return with_values(ClusterConfig(autoscale_ttft_ms=TTFT_MS, itl_slo_ms=ITL_MS), settings)


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
    parser = new_parser(__doc__)
    parser.add_argument("--trace", type=Path, default=None, help="recorded trace to play instead of the synthetic ones")
    parser.add_argument("--seed", type=int, default=1, help="seed of the synthetic traces")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the synthetic traces")
    parser.add_argument("--max-workers", type=int, default=6)
    arguments = parser.parse_args()
    if arguments.trace is not None:
        traces = {arguments.trace.stem: read_trace(arguments.trace, WORKER.max_model_len)}
    else:
        makers, minutes = ((shifting,), 2.0) if arguments.quick else ((bursty, diurnal, shifting), arguments.minutes)
        traces = {make.__name__: make(random.Random(arguments.seed), 60 * minutes) for make in makers}
    rows = []
    for name, trace in traces.items():
        for label, config in layouts(arguments.max_workers).items():
            rows.append({"trace": name, "workers": label, **measure(trace, config)})
            print(json.dumps(rows[-1]), flush=True)
    settings = {
        "ttft_ms": TTFT_MS,
        "itl_ms": ITL_MS,
        "minutes": arguments.minutes,
        "max_workers": arguments.max_workers,
        "seed": arguments.seed,
    }
    finish(Report.of("autoscale", {"settings": settings, "worker": WORKER, "rows": rows}, aims(rows)), arguments.json)


if __name__ == "__main__":
    main()
