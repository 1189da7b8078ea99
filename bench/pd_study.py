"""Where it pays to keep prefill and decode apart: 1P1D, 2P1D, 1P2D and engines that do both, by prompt:output shape.

`python -m bench.pd_study [--quick] [--json FILE] [--model FOLDER]`. Takes about nine minutes; --quick two.

Each worker has one thread and the same fixed share of a core (`bench.core_share`), as if it were a small machine of its
own: on two cores three workers would otherwise only take turns, and no ratio would mean anything. The proxy and the
clients share what is left. Load counts for each worker: 1 is what one engine that does both finishes while it has
sixteen requests at once. So all configurations are asked for the same per machine, and goodput is told per machine
(Zhong et al., DistServe, OSDI 2024). The limits are multiples of what one idle engine takes.
"""

from __future__ import annotations

from bench.load import StreamingUser, arrival_times, send  # first: it patches sockets for gevent  # isort: skip

import argparse
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.core_share import NoCoreShares, same_shares
from bench.latency import SLO, RequestTrace, goodput, summarise
from bench.pd_figures import verdicts
from bench.report import Report, add_common_options, finish
from tests.support.cluster import MODEL, Cluster

SHARE = 0.4
"""Of a core, for each worker: three of them leave 0.8 of two cores to the proxy and the clients."""
TTFT_LIMIT, TPOT_LIMIT = 5.0, 3.0
"""Over what one idle engine takes."""
LOADS: tuple[float, ...] = (0.5, 0.8)
NUM_TO_CALIBRATE = 16
DRAIN_S = 60.0


@dataclass(frozen=True)
class Configuration:
    name: str
    prefill: int
    decode: int

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode

    @property
    def options(self) -> list[str]:
        """Of `tandem up`. Without prefill workers decode workers compute prompts of any length."""
        threshold = "0" if self.prefill else "65536"
        counts = ["--prefill", str(self.prefill), "--decode", str(self.decode)]
        return [*counts, "--decode-prefill-threshold", threshold]


CONFIGURATIONS = (
    Configuration("1 engine", 0, 1),
    Configuration("2 engines", 0, 2),
    Configuration("1P1D", 1, 1),
    Configuration("2P1D", 2, 1),
    Configuration("1P2D", 1, 2),
)
"""The first one is what the others are calibrated by."""


@dataclass(frozen=True)
class Shape:
    """prompts, outputs: tokens; each request takes one pair."""

    name: str
    pairs: tuple[tuple[int, int], ...]

    def body(self, rng: random.Random) -> dict[str, Any]:
        num_prompt, num_output = rng.choice(self.pairs)
        return {
            "model": MODEL,
            "prompt": [rng.randrange(4, 2000) for _ in range(num_prompt)],
            "max_tokens": num_output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


SHAPES = (
    Shape("64:256", ((64, 256),)),
    Shape("256:64", ((256, 64),)),
    Shape("1024:128", ((1024, 128),)),
    Shape("1024:16", ((1024, 16),)),
    Shape("chat", ((30, 60), (60, 150), (120, 200), (300, 100), (600, 80), (1200, 40))),
)
"""chat: short and long turns in equal parts; a long prompt comes beside many short answers."""


@dataclass(frozen=True)
class Calibration:
    """Of one engine that does both. per_s: requests it finishes while it has sixteen."""

    per_s: float
    slo: SLO


def ask(url: str, bodies: list[dict[str, Any]], arrivals: list[float]) -> list[RequestTrace]:
    """Raises SystemExit when a request fails: figures of what is left would flatter."""
    traces = send(url, "/v1/completions", {}, arrivals, bodies, arrivals[-1] + DRAIN_S)
    failed = [trace.error for trace in traces if trace.error]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(traces)} requests failed: {failed[0]}")
    return traces


def calibrate(url: str, shape: Shape, rng: random.Random) -> Calibration:
    alone = [trace for _ in range(5) for trace in ask(url, [shape.body(rng)], [0.0])]
    figures = summarise(alone)
    crowd = summarise(ask(url, [shape.body(rng) for _ in range(NUM_TO_CALIBRATE)], [0.0] * NUM_TO_CALIBRATE))
    assert figures.ttft_ms is not None and figures.tpot_ms is not None
    # The largest of the idle ones: in the mix a long prompt must be able to keep its limit.
    slo = SLO(TTFT_LIMIT * figures.ttft_ms.max / 1e3, TPOT_LIMIT * figures.tpot_ms.p50 / 1e3)
    return Calibration(crowd.requests_per_s, slo)


@contextmanager
def limited_cluster(configuration: Configuration, model: list[str], share: float) -> Iterator[str]:
    """Its URL. share: of a core for each worker; 0 sets no limit."""
    options = [*configuration.options, "--threads-per-worker", "1", "--kv-cache-gib", "0.25"]
    with Cluster(*model, *options) as cluster:
        pids = [report.worker.pid for report in cluster.status().workers]
        assert len(pids) == configuration.num_workers
        with same_shares(pids, share):
            yield cluster.url


def measure(
    url: str, configuration: Configuration, shape: Shape, load: float, calibration: Calibration, seconds: float
) -> dict[str, Any]:
    """The same requests at the same times for all configurations of as many workers."""
    rng = random.Random(f"{shape.name} {load} {configuration.num_workers}")
    per_s = load * calibration.per_s * configuration.num_workers
    num_requests = max(4, round(per_s * seconds))
    bodies = [shape.body(rng) for _ in range(num_requests)]
    traces = ask(url, bodies, arrival_times(num_requests, per_s, rng))
    figures = summarise(traces)
    assert figures.ttft_ms is not None and figures.itl_ms is not None and figures.tpot_ms is not None
    good_per_s = goodput(traces, calibration.slo)
    return {
        "configuration": configuration.name,
        "workers": configuration.num_workers,
        "shape": shape.name,
        "load": load,
        "requests": num_requests,
        "offered_per_s": round(per_s, 2),
        "ttft_ms_p50": round(figures.ttft_ms.p50, 1),
        "ttft_ms_p99": round(figures.ttft_ms.p99, 1),
        "tpot_ms_p50": round(figures.tpot_ms.p50, 2),
        "itl_ms_p50": round(figures.itl_ms.p50, 2),
        "itl_ms_p99": round(figures.itl_ms.p99, 2),
        "output_tokens_per_s": round(figures.output_tokens_per_s, 1),
        "tokens_per_s_per_worker": round(figures.output_tokens_per_s / configuration.num_workers, 1),
        "good": round(good_per_s / figures.requests_per_s, 3),
        "goodput_per_s_per_worker": round(good_per_s / configuration.num_workers, 3),
    }


def run(
    configurations: list[Configuration],
    shapes: list[Shape],
    loads: tuple[float, ...],
    seconds: float,
    model: list[str],
    share: float,
) -> tuple[dict[str, Calibration], list[dict[str, Any]]]:
    calibrations: dict[str, Calibration] = {}
    rows = []
    for configuration in configurations:
        with limited_cluster(configuration, model, share) as url:
            rng = random.Random(1)
            for shape in shapes:
                warm = [shape.body(rng) for _ in range(2 * configuration.num_workers)]
                ask(url, warm, [0.0] * len(warm))
                if shape.name not in calibrations:
                    calibrations[shape.name] = calibrate(url, shape, rng)
                for load in loads:
                    row = measure(url, configuration, shape, load, calibrations[shape.name], seconds)
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    return calibrations, rows


def print_tables(rows: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    for lines in (rows, found):
        if lines:
            table = Table(*lines[0])
            for line in lines:
                table.add_row(*(str(value) for value in line.values()))
            Console(width=200).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pd_study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder of the model; empty takes the noise model")
    parser.add_argument("--seconds", type=float, default=6.0, help="of arrivals, for each shape and load")
    parser.add_argument("--share", type=float, default=SHARE, help="of a core for each worker; 0 sets no limit")
    add_common_options(parser)
    arguments = parser.parse_args()
    model = ["--model", arguments.model, "--served-model-name", MODEL] if arguments.model else []
    configurations, shapes, loads, seconds = list(CONFIGURATIONS), list(SHAPES), LOADS, arguments.seconds
    if arguments.quick:
        configurations = [each for each in configurations if each.name in ("1 engine", "2 engines", "1P1D")]
        shapes, loads, seconds = [SHAPES[0], SHAPES[3]], (0.8,), min(4.0, seconds)
    StreamingUser.connection_timeout = 60.0
    try:
        calibrations, rows = run(configurations, shapes, loads, seconds, model, arguments.share)
    except NoCoreShares as error:
        sys.exit(f"{error}; with --share 0 workers take turns on the cores, and the figures are only about that")
    found = verdicts(rows)
    print_tables(rows, found)
    figures = {
        "cores_per_worker": arguments.share or "no limit: workers share the machine's cores",
        "limits": {"ttft_over_idle": TTFT_LIMIT, "tpot_over_idle": TPOT_LIMIT},
        "calibrations": {
            name: {
                "per_s": round(each.per_s, 2),
                "ttft_ms_at_most": round(1e3 * each.slo.ttft_s, 1),
                "tpot_ms_at_most": round(1e3 * each.slo.tpot_s, 2),
            }
            for name, each in calibrations.items()
        },
        "verdicts": found,
        "rows": rows,
    }
    finish(Report.of("pd_study", figures), arguments.json)


if __name__ == "__main__":
    main()
