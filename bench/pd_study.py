"""Four elastic workers against every fixed ratio of four prefill and decode workers, by shape and load.

    python -m bench.pd_study [--quick] [--json FILE]

Workers and proxies are the real ones, in simulated time (`deploy.planning.player`); steps take the times of `WORKER`.
Load 1 is what four engines that do both phases would complete with sixteen sequences each. A request is good if its
TTFT is at most 5 times and its TPOT at most 3 times that of an idle engine; for shapes of several sizes, of the largest
prompt. All workers run with the TPOT limit as `--itl-slo-ms`; other settings are the defaults. Goodput counts good
requests per second of arrivals (Zhong et al., DistServe, OSDI 2024).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.support.report import Aim, Report, finish, new_parser, print_rows
from tandem.deploy.cluster_config import ClusterConfig, with_device_defaults
from tandem.deploy.planning.player import Player, TraceRequest
from tandem.deploy.planning.worker_figures import WorkerFigures, planned_shape

NUM_WORKERS = 4
ELASTIC = "elastic"
LAYOUTS = {
    ELASTIC: ClusterConfig(prefill=0, decode=0, workers=4),
    "1P3D": ClusterConfig(prefill=1, decode=3),
    "2P2D": ClusterConfig(prefill=2, decode=2),
    "3P1D": ClusterConfig(prefill=3, decode=1),
}
LOADS = (0.4, 0.7, 0.9)
TTFT_LIMIT, TPOT_LIMIT = 5.0, 3.0
"""Over what one idle engine takes."""
BATCH = 16
"""Sequences of the engine that load 1 is calculated from."""
MIN_GOODPUT = 0.98
WORKER = WorkerFigures(
    prompt_tokens_per_s=8000.0, fixed_step_s=0.012, step_s_per_sequence=0.0006, num_blocks=4096, block_size=64,
    max_model_len=8192, kv_s_per_token=0.0008 / 64,
)  # fmt: skip
"""8 MiB of KV at 10 GB/s for a block."""


def decode_s(num_sequences: int) -> float:
    """Returns the seconds of a step of so many sequences."""
    return WORKER.fixed_step_s + WORKER.step_s_per_sequence * num_sequences


@dataclass(frozen=True)
class TrafficShape:
    """sizes: prompt and output tokens; each request takes one pair. is_shift: in order over time, not at random."""

    name: str
    sizes: tuple[tuple[int, int], ...]
    is_shift: bool = False

    def requests(self, rng: random.Random, per_s: float, seconds: float) -> list[TraceRequest]:
        found = []
        at = rng.expovariate(per_s)
        while at < seconds:
            number = int(at / seconds * len(self.sizes)) if self.is_shift else rng.randrange(len(self.sizes))
            found.append(TraceRequest(at, *self.sizes[number]))
            at += rng.expovariate(per_s)
        return found

    def capacity_per_s(self) -> float:
        """Requests per second of load 1."""
        token_s = decode_s(BATCH) / BATCH
        costs = [prompt / WORKER.prompt_tokens_per_s + output * token_s for prompt, output in self.sizes]
        return NUM_WORKERS / (max(costs) if self.is_shift else sum(costs) / len(costs))

    def limits_s(self) -> tuple[float, float]:
        """Returns the limits on TTFT and TPOT."""
        longest = max(prompt for prompt, _ in self.sizes)
        return TTFT_LIMIT * longest / WORKER.prompt_tokens_per_s, TPOT_LIMIT * decode_s(1)


SHAPES = (
    TrafficShape("64:256", ((64, 256),)),
    TrafficShape("256:64", ((256, 64),)),
    TrafficShape("1024:128", ((1024, 128),)),
    TrafficShape("1024:16", ((1024, 16),)),
    TrafficShape("chat", ((30, 60), (60, 150), (120, 200), (300, 100), (600, 80), (1200, 40))),
    TrafficShape("shift", ((2048, 16), (128, 256)), is_shift=True),
)
"""chat: short and long turns in equal parts. shift: long prompts, then long answers, at one rate."""


def measure(shape: TrafficShape, load: float, layout: str, seconds: float) -> dict[str, Any]:
    """Plays the same requests for every layout."""
    requests = shape.requests(random.Random(f"{shape.name} {load}"), load * shape.capacity_per_s(), seconds)
    ttft_s, tpot_s = shape.limits_s()
    config = msgspec.structs.replace(LAYOUTS[layout], itl_slo_ms=round(1000 * tpot_s))
    planned = planned_shape(WORKER, with_device_defaults(config, on_gpus=False))
    figures = Player(requests, planned).play().summary(ttft_s, tpot_s)
    return {
        "shape": shape.name,
        "load": load,
        "layout": layout,
        "requests": len(requests),
        "ttft_ms_mean": figures["ttft_ms"]["mean"],
        "ttft_ms_p99": figures["ttft_ms"]["p99"],
        "tpot_ms_mean": figures["tpot_ms"]["mean"],
        "tpot_ms_p99": figures["tpot_ms"]["p99"],
        "good": figures["goodput"],
        "goodput_per_s": round(figures["goodput"] * len(requests) / seconds, 2),
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a line for each cell: goodput of each layout, and elastic relative to the best and worst fixed one."""
    lines = []
    for shape, load in dict.fromkeys((row["shape"], row["load"]) for row in rows):
        goodputs = {r["layout"]: r["goodput_per_s"] for r in rows if (r["shape"], r["load"]) == (shape, load)}
        fixed = [value for layout, value in goodputs.items() if layout != ELASTIC]
        best = max(*fixed, 1e-9)  # no layout keeps the limits in some overloads
        ratios = {"elastic / best": goodputs[ELASTIC] / best, "worst / best": min(fixed) / best}
        lines.append(
            {"shape": shape, "load": load} | goodputs | {name: round(value, 3) for name, value in ratios.items()}
        )
    return lines


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--shape", choices=[shape.name for shape in SHAPES], help="only this shape")
    options = parser.parse_args()
    seconds = 5.0 if options.quick else 20.0  # simulated time
    rows = []
    for shape in SHAPES:
        for load in LOADS if options.shape in (None, shape.name) else ():
            for layout in LAYOUTS:
                rows.append(measure(shape, load, layout, seconds))
                print(json.dumps(rows[-1]), flush=True)
    cells = summary(rows)
    print_rows(cells)
    aims = [
        Aim.of(f"{c['shape']}, load {c['load']}: elastic / best fixed", c["elastic / best"], MIN_GOODPUT, "higher")
        for c in cells
    ]
    figures = {"worker": msgspec.to_builtins(WORKER), "cells": cells, "rows": rows}
    finish(Report.of("pd_study", figures, aims), options.json)


if __name__ == "__main__":
    main()
