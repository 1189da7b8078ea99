"""Latencies and throughput that `tandem simulate --trace` predicts, beside those of the real cluster.

    python -m bench.planning --models FOLDER [--cases 256/64@2,chat] [--layouts elastic-2] [--quick] [--json FILE]

The loads and the models are those of `bench.never_worse`; one prefill and one decode worker, and two elastic ones. Each
case is played on the real cluster. What was sent, and when, is the trace of the simulated one, whose step times
(`tandem status --json`) and time between steps (metrics of the workers) are those that the cluster tells after the
case: it has measured them under this load. Beside it stands what follows from the step times of another load, which the
cluster gets before the first case: how far a plan for another load may be off.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from bench.never_worse import (
    CASES,
    QUICK_SHARE,
    SERVERS,
    TANDEM_FLAGS,
    TIMEOUT_S,
    ChatTurn,
    Conversation,
    LoadCase,
    LoadClient,
    chosen,
    poisson,
)
from bench.support.latency import RequestTrace, summarise
from bench.support.report import Aim, Report, finish, log, new_parser, print_rows
from bench.support.servers import server, tandem
from tandem.deploy.cluster_config import ClusterConfig, with_device_defaults
from tandem.deploy.planning.player import Player
from tandem.deploy.planning.trace import read_trace
from tandem.deploy.planning.worker_figures import WorkerFigures, planned_shape, read_figures
from tests.support.ports import free_port

LAYOUTS = {"1P1D": ClusterConfig(), "elastic-2": ClusterConfig(prefill=0, decode=0, workers=2)}
CALIBRATION = {
    "llama100m": poisson(16, 3.0, ChatTurn(400, 48)),
    "tiny": poisson(200, 100.0, ChatTurn(300, 48)),
}
"""Loads from which the workers learn their step times: sequences in several numbers, prompts in between."""
MAX_ERROR = 0.15
FIGURES = ("ttft_ms", "tpot_ms", "output_tokens_per_s")
SIMULATED, OF_OTHER_LOAD = "simulated", "of another load"
"""Figures that follow from step times of the case's own load, and of that in CALIBRATION."""
MIN_CASES = 6
"""Cases of eight, in each layout, of which all figures must be right."""


async def send(conversations: list[Conversation], port: int, seed: str) -> list[RequestTrace]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        return await LoadClient(session, port, seed).run(conversations)


def lines_of(conversations: list[Conversation], traces: list[RequestTrace]) -> list[dict[str, Any]]:
    """Returns the lines of a trace in the form that `deploy.planning.trace` reads."""
    lines: list[dict[str, Any]] = []
    for conversation in conversations:
        for turn in range(len(conversation.turns)):
            sent = traces[len(lines)]
            lines.append(
                {
                    "timestamp": 1000 * sent.sent_at,
                    "input_length": sent.num_prompt_tokens,
                    "output_length": sent.num_output_tokens,
                    "chat_id": len(lines),
                    "parent_chat_id": len(lines) - 1 if turn else -1,
                }
            )
    return lines


def figures_of(port: int, folder: Path) -> WorkerFigures:
    """Returns the step times that the cluster on this port has measured."""
    command = [sys.executable, "-m", "tandem.deploy.cli", "status", "--json", "--port", str(port)]
    file = folder / "status.json"
    file.write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=60).stdout)
    return read_figures(file)


def predicted(figures: WorkerFigures, layout: str, trace: Path) -> dict[str, float]:
    config = with_device_defaults(LAYOUTS[layout], on_gpus=False)
    summary = Player(read_trace(trace, figures.max_model_len), planned_shape(figures, config)).play().summary()
    if summary["errors"]:
        raise SystemExit(f"error: simulated requests failed: {summary['errors']}")
    return {
        "ttft_ms": summary["ttft_ms"]["mean"],
        "tpot_ms": summary["tpot_ms"]["mean"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
    }


def measured(traces: list[RequestTrace]) -> dict[str, float]:
    figures = summarise(traces)
    if figures.errors or figures.ttft_ms is None or figures.tpot_ms is None:
        raise SystemExit(f"error: requests failed: {figures.errors}")
    means = {"ttft_ms": figures.ttft_ms.mean, "tpot_ms": figures.tpot_ms.mean}
    return {name: round(value, 2) for name, value in means.items()} | {
        "output_tokens_per_s": round(figures.output_tokens_per_s, 2)
    }


def run_layout(layout: str, model: Path, cases: list[LoadCase], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each case of one model."""
    port, share, rows = free_port(), QUICK_SHARE if options.quick else 1.0, []
    log(f"{model.name}: starting {layout}")
    command = tandem(model, port, *SERVERS[layout], *TANDEM_FLAGS, "--dtype", options.dtype)
    with tempfile.TemporaryDirectory() as name, server(command, port):
        folder = Path(name)
        uvloop.run(send(CALIBRATION[model.name](random.Random(0), 1.0), port, "calibration"))
        other = figures_of(port, folder)
        log(f"  {other}")
        for case in cases:
            real: list[dict[str, float]] = []
            simulated: dict[str, list[dict[str, float]]] = {SIMULATED: [], OF_OTHER_LOAD: []}
            for repeat in range(case.num_repeats):
                conversations = case.draw(random.Random(f"{case.name} {repeat}"), share)
                traces = uvloop.run(send(conversations, port, f"{case.name} {repeat}"))
                real.append(measured(traces))
                trace = folder / "trace.jsonl"
                trace.write_text("\n".join(json.dumps(line) for line in lines_of(conversations, traces)))
                own = figures_of(port, folder)
                for name, figures in ((SIMULATED, own), (OF_OTHER_LOAD, other)):
                    simulated[name].append(predicted(figures, layout, trace))
                log(f"  {case.name}: {real[-1]}, simulated {simulated[SIMULATED][-1]}")
            row = {"layout": layout, "case": case.name, "requests": len(traces) * case.num_repeats}
            rows.append(row | compared(real, simulated) | {"worker": msgspec.to_builtins(own)})
            log(f"  {rows[-1]}")
    return rows


def compared(real: list[dict[str, float]], simulated: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Returns means of the repeats, their ratios and the largest error; simulated: by kind of step times."""
    row: dict[str, float] = {}
    for figure in FIGURES:
        row[figure] = round(_mean(real, figure), 2)
        for name, runs in simulated.items():
            row[f"{figure} {name}"] = round(_mean(runs, figure), 2)
            row[f"{figure} {name}, ratio"] = round(_mean(runs, figure) / _mean(real, figure), 3)
    for name in simulated:
        row[f"error {name}"] = round(max(abs(row[f"{figure} {name}, ratio"] - 1) for figure in FIGURES), 3)
    return row


def _mean(runs: list[dict[str, float]], figure: str) -> float:
    return sum(run[figure] for run in runs) / len(runs)


def aims(rows: list[dict[str, Any]]) -> list[Aim]:
    found = []
    for layout in dict.fromkeys(row["layout"] for row in rows):
        of_layout = [row for row in rows if row["layout"] == layout]
        wanted = MIN_CASES * len(of_layout) / len(CASES)
        for name in (SIMULATED, OF_OTHER_LOAD):
            num_right = sum(row[f"error {name}"] <= MAX_ERROR for row in of_layout)
            found.append(
                Aim.of(f"{layout}, {name}: cases with all errors within {MAX_ERROR:.0%}", num_right, wanted, "higher")
            )
        found += [
            Aim.of(f"{layout}, {row['case']}: largest error", row[f"error {SIMULATED}"], MAX_ERROR, "lower")
            for row in of_layout
        ]
    return found


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--models", type=Path, required=True, help="folder with the models llama100m and tiny")
    parser.add_argument("--cases", default="", help="comma-separated; all by default")
    parser.add_argument("--layouts", default="", help=f"comma-separated, of {', '.join(LAYOUTS)}; all by default")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    names = chosen(parser, options.cases, [case.name for case in CASES])
    cases = [case for case in CASES if case.name in names]
    rows = []
    for layout in chosen(parser, options.layouts, list(LAYOUTS)):
        for model in dict.fromkeys(case.model for case in cases):
            of_model = [case for case in cases if case.model == model]
            rows += run_layout(layout, options.models / model, of_model, options)
    print_rows([{name: value for name, value in row.items() if name != "worker"} for row in rows])
    finish(Report.of("planning", {"dtype": options.dtype, "rows": rows}, aims(rows)), options.json)


if __name__ == "__main__":
    main()
