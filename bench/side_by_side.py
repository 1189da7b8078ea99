"""Tandem, vLLM's prefill/decode pair and one vLLM on the same cores, in turn, under vLLM's own client and seed.

    python -m bench.side_by_side --peers FOLDER --vllm VENV --model FOLDER
    python -m bench.side_by_side --peers FOLDER --vllm VENV --model FOLDER --burst 64

FOLDER of --peers holds vllm_pd.sh and vllm_single.sh (VENV MODEL PORT); VENV is a virtual environment with vLLM. Every
process started here is ended here, by process group. --burst is for a tiny model, where everything but the model is
what costs: Tandem and one vLLM, so many requests of 128 tokens in and 128 out at once, rounds of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.process_cpu import family_cpu_s
from bench.report import Aim, Report, add_common_options, finish

START_TIMEOUT_S = 400.0
CLIENT_TIMEOUT_S = 240.0
WARM_UP_REQUESTS = 8
BURST_TOKENS = 128
BURST_ROUNDS = 2
FIGURES = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "p99_itl_ms", "output_throughput", "completed")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.side_by_side", description=__doc__)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--vllm", type=Path, required=True, help="virtual environment with vLLM")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rates", default="2,4", help="requests per second, comma-separated")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--burst", type=int, metavar="N", help="N requests at once, in place of --rates")
    parser.add_argument("--port", type=int, default=8310)
    parser.add_argument("--kept", type=Path, help="keep figures here; servers whose figures are in it do not run again")
    add_common_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.num_prompts = 8
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    rates = [float(rate) for rate in options.rates.split(",")]
    peer = [str(options.vllm), str(options.model), str(options.port)]
    commands = {
        "vllm_pd": [str(options.peers / "vllm_pd.sh"), *peer],
        "vllm_single": [str(options.peers / "vllm_single.sh"), *peer],
        "tandem": [
            sys.executable, "-m", "tandem.deploy.cli", "up", "--model", str(options.model), "--served-model-name", "m",
            "--port", str(options.port), "--dtype", "bfloat16", "--max-model-len", "4096", "--kv-cache-gib", "2",
        ],
    }  # fmt: skip
    figures: dict[str, dict[str, Any]] = {}
    if options.kept is not None and options.kept.exists():
        figures = json.loads(options.kept.read_text())
    for name, command in commands.items():
        if name in figures or (options.burst and name == "vllm_pd"):
            continue
        say(f"{name}: starting")
        with server(command, options.port) as pid:
            say(f"{name}: warming up")
            for i in range(WARM_UP_REQUESTS):
                complete(options.port, [i + 3] * 256, 16)
            figures[name] = bursts(options, name, pid) if options.burst else rated(options, name, rates)
        if options.kept is not None:
            options.kept.write_text(json.dumps(figures))
    print_table(figures)
    if options.burst:
        finish(Report.of("side_by_side", figures, burst_aims(figures)), options.json)
    else:
        finish(Report.of("side_by_side", figures, aims(figures)), options.json)


def rated(options: argparse.Namespace, name: str, rates: list[float]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for rate in rates if name != "vllm_single" else {4.0} & set(rates):
        say(f"{name}: {options.num_prompts} requests at {rate:g}/s")
        figures[f"{rate:g}"] = load(options, str(rate), options.num_prompts, 256, 64)
    return figures


def bursts(options: argparse.Namespace, name: str, pid: int) -> dict[str, Any]:
    """Each round has prompts of its own."""
    with ThreadPoolExecutor(options.burst) as clients:  # batches of that size for the first time
        list(clients.map(lambda i: complete(options.port, [i + 3] * BURST_TOKENS, 16), range(options.burst)))
    figures: dict[str, Any] = {}
    for number in range(1, BURST_ROUNDS + 1):
        say(f"{name}: {options.burst} requests at once, round {number}")
        before = family_cpu_s(pid)
        told = load(options, "inf", options.burst, BURST_TOKENS, BURST_TOKENS, number)
        # Holds also where others have part of the cores. What a server spins in is counted too.
        told["cpu_ms_per_token"] = round((family_cpu_s(pid) - before) * 1e3 / (options.burst * BURST_TOKENS), 3)
        figures[f"burst {number}"] = told
    return figures


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def server(command: list[str], port: int) -> Iterator[int]:
    """Run it until a completion works, yield its process id; end its whole process group after."""
    with tempfile.TemporaryDirectory() as logs:
        process = subprocess.Popen(
            command, start_new_session=True, env={**os.environ, "LOG_DIR": logs}, stdout=subprocess.DEVNULL
        )
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not is_up(port):
                if process.poll() is not None:
                    raise SystemExit(f"{Path(command[0]).name} ended with {process.returncode}")
                if time.monotonic() > deadline:
                    raise SystemExit(f"{Path(command[0]).name} was not ready within {START_TIMEOUT_S:.0f} s")
                time.sleep(1)
            yield process.pid
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_up(port: int) -> bool:
    try:
        complete(port, "up?", 2)
        return True
    except (urllib.error.URLError, OSError):
        return False


def complete(port: int, prompt: str | list[int], max_tokens: int) -> None:
    """Raises URLError or OSError."""
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def load(
    options: argparse.Namespace,
    rate: str,
    num_prompts: int,
    num_input_tokens: int,
    num_output_tokens: int,
    seed: int = 0,
) -> dict[str, float]:
    """One run of `vllm bench serve`."""
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


def print_table(figures: dict[str, dict[str, Any]]) -> None:
    columns = list(next(iter(next(iter(figures.values())).values())))
    table = Table("server", "requests/s", *columns)
    for server_name, by_rate in figures.items():
        for rate, values in by_rate.items():
            table.add_row(server_name, rate, *(f"{values[name]:.2f}" for name in columns))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
