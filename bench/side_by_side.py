"""Tandem, vLLM's prefill/decode pair and one vLLM on the same cores, in turn, under vLLM's own client and seed.

    python -m bench.side_by_side --vllm VENV --model FOLDER
    python -m bench.side_by_side --vllm VENV --model FOLDER --burst 64

All servers use bfloat16, a model length of 4,096 and 2 GiB of KV cache; other settings are the defaults. --burst is for
a tiny model, where the cost of everything except the model shows: it sends all requests at once, 128 tokens in and out,
to Tandem and one vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.support.report import Aim, Report, finish, log, new_parser, print_rows
from bench.support.servers import add_vllm_option, complete, server, tandem, vllm_pair, vllm_serve
from tests.support.processes import family_cpu_s

CLIENT_TIMEOUT_S = 240.0
WARM_UP_REQUESTS = 8
BURST_TOKENS = 128
BURST_ROUNDS = 2
FIGURES = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "p99_itl_ms", "output_throughput", "completed")


def main() -> None:
    parser = new_parser(__doc__)
    add_vllm_option(parser, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rates", default="2,4", help="requests per second, comma-separated")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--burst", type=int, metavar="N", help="send N requests at once instead of --rates")
    parser.add_argument("--port", type=int, default=8310)
    parser.add_argument("--kept", type=Path, help="figures file; servers in it do not run again")
    options = parser.parse_args()
    if options.quick:
        options.num_prompts = 8
    rates = [float(rate) for rate in options.rates.split(",")]
    flags = ["--dtype", "bfloat16", "--max-model-len", "4096", "--kv-cache-gib", "2"]
    commands: dict[str, tuple[list[str], dict[str, str]]] = {
        "vllm_pd": (vllm_pair(options.vllm, options.model, options.port), {}),
        "vllm_single": vllm_serve(options.vllm, options.model, options.port),
        "tandem": (tandem(options.model, options.port, *flags), {}),
    }
    figures: dict[str, dict[str, Any]] = {}
    if options.kept is not None and options.kept.exists():
        figures = json.loads(options.kept.read_text())
    for name, (command, env) in commands.items():
        if name in figures or (options.burst and name == "vllm_pd"):
            continue
        log(f"{name}: starting")
        with server(command, options.port, env) as pid:
            log(f"{name}: warming up")
            for i in range(WARM_UP_REQUESTS):
                complete(options.port, [i + 3] * 256, 16)
            figures[name] = bursts(options, name, pid) if options.burst else rated(options, name, rates)
        if options.kept is not None:
            options.kept.write_text(json.dumps(figures))
    print_rows(
        [
            {"server": name, "requests/s": rate, **values}
            for name, by_rate in figures.items()
            for rate, values in by_rate.items()
        ]
    )
    reached = burst_aims(figures) if options.burst else aims(figures)
    finish(Report.of("side_by_side", figures, reached), options.json)


def rated(options: argparse.Namespace, name: str, rates: list[float]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for rate in rates if name != "vllm_single" else {4.0} & set(rates):
        log(f"{name}: {options.num_prompts} requests at {rate:g}/s")
        figures[f"{rate:g}"] = load(options, str(rate), options.num_prompts, 256, 64)
    return figures


def bursts(options: argparse.Namespace, name: str, pid: int) -> dict[str, Any]:
    """Sends `options.burst` requests at once, BURST_ROUNDS times with different prompts."""
    with ThreadPoolExecutor(options.burst) as clients:  # the first batch of this size is not measured
        list(clients.map(lambda i: complete(options.port, [i + 3] * BURST_TOKENS, 16), range(options.burst)))
    figures: dict[str, Any] = {}
    for number in range(1, BURST_ROUNDS + 1):
        log(f"{name}: {options.burst} requests at once, round {number}")
        before = family_cpu_s(pid)
        measured = load(options, "inf", options.burst, BURST_TOKENS, BURST_TOKENS, number)
        # CPU time is comparable on a shared machine; it includes what a server spends on spinning.
        measured["cpu_ms_per_token"] = round((family_cpu_s(pid) - before) * 1e3 / (options.burst * BURST_TOKENS), 3)
        figures[f"burst {number}"] = measured
    return figures


def load(
    options: argparse.Namespace,
    rate: str,
    num_prompts: int,
    num_input_tokens: int,
    num_output_tokens: int,
    seed: int = 0,
) -> dict[str, float]:
    """Runs `vllm bench serve` once and returns FIGURES of its result."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(options.vllm / "bin" / "vllm"), "bench", "serve", "--backend", "openai",
            "--base-url", f"http://127.0.0.1:{options.port}", "--model", "m", "--tokenizer", str(options.model),
            "--dataset-name", "random", "--random-input-len", str(num_input_tokens),
            "--random-output-len", str(num_output_tokens), "--seed", str(seed),
            "--num-prompts", str(num_prompts), "--request-rate", rate, "--ignore-eos",
            "--save-result", "--result-dir", folder, "--result-filename", "result.json",
        ]  # fmt: skip
        env = {**os.environ, "VLLM_TARGET_DEVICE": "cpu"}
        subprocess.run(
            command, check=True, env=env, timeout=CLIENT_TIMEOUT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        result = json.loads((Path(folder) / "result.json").read_text())
    return {name: round(float(result[name]), 2) for name in FIGURES}


def ratio(figures: dict[str, dict[str, Any]], peer: str, rate: str, name: str) -> float:
    return float(figures["tandem"][rate][name] / figures[peer][rate][name])


def aims(figures: dict[str, dict[str, Any]]) -> list[Aim]:
    wanted = []
    for rate in figures["tandem"]:
        where = f"at {rate} requests/s, Tandem / vLLM pair"
        wanted += [
            Aim.of(f"mean TTFT {where}", ratio(figures, "vllm_pd", rate, "mean_ttft_ms"), 0.3, "lower"),
            Aim.of(f"mean TPOT {where}", ratio(figures, "vllm_pd", rate, "mean_tpot_ms"), 0.5, "lower"),
            Aim.of(f"output tokens/s {where}", ratio(figures, "vllm_pd", rate, "output_throughput"), 1.0, "higher"),
        ]
    if "4" in figures["tandem"]:
        where = "at 4 requests/s, Tandem / one vLLM"
        wanted += [
            Aim.of(f"p99 ITL {where}", ratio(figures, "vllm_single", "4", "p99_itl_ms"), 0.4, "lower"),
            Aim.of(f"mean TTFT {where}", ratio(figures, "vllm_single", "4", "mean_ttft_ms"), 1.2, "lower"),
        ]
    return wanted


def burst_aims(figures: dict[str, dict[str, Any]]) -> list[Aim]:
    def ratio_of(figure: str) -> float:
        tandem, vllm = (
            statistics.median(burst[figure] for burst in figures[name].values()) for name in ("tandem", "vllm_single")
        )
        return float(tandem / vllm)

    return [
        Aim.of("output tokens/s, all at once, Tandem / one vLLM", ratio_of("output_throughput"), 2.0, "higher"),
        Aim.of("CPU time per output token, Tandem / one vLLM", ratio_of("cpu_ms_per_token"), 0.5, "lower"),
    ]


if __name__ == "__main__":
    main()
