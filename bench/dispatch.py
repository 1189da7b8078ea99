"""ZeroMQ between proxy and workers against HTTP, with a connection for each request and with pooled ones.

Three clusters of the same processes, side by side (idle ones cost nothing), loaded in turns so that what else the
machine does meets all alike: 96 requests of 1024 tokens in and 6 out, Poisson. The model is as small as can be, for
what is measured is the way to it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from bench.noise_model import ensure_noise_model
from bench.ports import free_port
from bench.report import Aim, Report, add_common_options, finish

VARIANTS = ("zmq", "http pooled", "http fresh")
FIGURES = ("ttft_ms", "itl_ms")
MODEL = "m"
_SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
_START_TIMEOUT_S = 180.0
_KV_CACHE_GIB = 0.06
"""240 prompts of 1024 tokens: what the warm-up uses up once, as a server that has run for a while has. A page of memory
that is written to for the first time costs several times as much as the writing."""
_WARM_UP_PROMPTS = 256
_LONG_RATE = 24
"""Requests per second at which a round lasts four seconds. Faster ones are over in one or two, and a hiccup decides."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.dispatch", description=__doc__)
    parser.add_argument("--rates", default="12,24,48,96", help="requests per second, comma-separated")
    parser.add_argument("--num-prompts", type=int, default=96)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=6)
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help=f"each variant is loaded so often, from {2 * _LONG_RATE}/s on more often; figures are medians",
    )
    add_common_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.num_prompts, options.rounds = 24, 1
    figures: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = smallest_model(folder / "model")
        ports = {variant: stack.enter_context(cluster(variant, model)) for variant in VARIANTS}
        for port in ports.values():
            load(options, port, 48.0, _WARM_UP_PROMPTS, 0)  # not counted
        for rate in options.rates.split(","):
            runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
            for number in range(num_rounds(options.rounds, float(rate))):
                for variant in VARIANTS:
                    runs[variant].append(load(options, ports[variant], float(rate), options.num_prompts, number + 1))
            figures[rate] = {variant: medians(runs[variant]) for variant in VARIANTS}
            figures[rate]["zmq over"] = {variant: ratios(runs["zmq"], runs[variant]) for variant in VARIANTS[1:]}
    print_table(figures)
    finish(Report.of("dispatch", figures, aims(figures)), options.json)


def load(options: argparse.Namespace, port: int, rate: float, num_prompts: int, seed: int) -> dict[str, Any]:
    """One run of `bench.load`, in a process of its own. The seed sets prompts and arrivals."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "load.json"
        command = [
            sys.executable, "-m", "bench.load", "--url", f"http://127.0.0.1:{port}", "--model", MODEL,
            "--num-prompts", str(num_prompts), "--request-rate", str(rate), "--input-len", str(options.input_len),
            "--output-len", str(options.output_len), "--seed", str(seed), "--max-time", "120", "--json", str(file),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=180)
        figures: dict[str, Any] = json.loads(file.read_text())["figures"]["load"]
    if figures["num_completed"] != num_prompts:
        raise SystemExit(f"{figures['num_completed']} of {num_prompts} requests were answered: {figures['errors']}")
    return figures


def num_rounds(rounds: int, rate: float) -> int:
    return rounds * max(1, round(rate / _LONG_RATE))


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the runs' means and 99th percentiles, in milliseconds."""
    return {
        name: {key: statistics.median(run[name][key] for run in runs) for key in ("mean", "p50", "p99")}
        for name in FIGURES
    }


def ratios(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, float]:
    """Of the means, round by round: those of a round have the same arrivals, and seconds between them."""
    pairs = list(zip(runs, others, strict=True))
    return {
        name: statistics.median(one[name]["mean"] / other[name]["mean"] for one, other in pairs) for name in FIGURES
    }


@contextlib.contextmanager
def cluster(variant: str, model: Path) -> Iterator[int]:
    """Its port."""
    port = free_port()
    start = ["deploy.cli"] if variant == "zmq" else ["bench.http_dispatch", variant.removeprefix("http ")]
    command = [
        sys.executable, "-m", *start, "up", "--model", str(model), "--served-model-name", MODEL, "--port", str(port),
        "--load-format", "dummy", "--max-num-batched-tokens", "2048", "--kv-cache-gib", str(_KV_CACHE_GIB),
        "--max-num-seqs", "128",
        "--decode-prefill-threshold", "0",  # each request goes to both workers, also when its prompt is cached
    ]  # fmt: skip
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _is_up(port):
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the cluster with {variant} did not start")
            time.sleep(0.2)
        yield port
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(30)


def _is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def smallest_model(folder: Path) -> Path:
    """The noise model's tokeniser and a config of one small layer; weights are made when it is loaded."""
    shutil.copytree(ensure_noise_model(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_bytes(msgspec.json.encode({**config, **_SHAPE}))
    return folder


def aims(figures: dict[str, dict[str, Any]]) -> list[Aim]:
    """Reported elsewhere: TTFT 5 to 10 % lower, ITL 5 to 15 %. To be beaten against pooled HTTP, the stronger one."""
    wanted = []
    for rate, of_rate in figures.items():
        for variant in VARIANTS[1:]:
            for name, aim in (("ttft_ms", 0.9), ("itl_ms", 0.85)):
                what = f"mean {name.removesuffix('_ms')} of zmq / {variant}, {rate}/s"
                wanted.append(Aim.of(what, of_rate["zmq over"][variant][name], aim, "lower"))
    return wanted


def print_table(figures: dict[str, dict[str, Any]]) -> None:
    table = Table("requests/s", "dispatch", "TTFT mean ms", "p50", "p99", "ITL mean ms", "p50", "p99")
    for rate, of_rate in figures.items():
        for variant in VARIANTS:
            spreads = of_rate[variant]
            cells = [f"{spreads[name][key]:.1f}" for name in FIGURES for key in ("mean", "p50", "p99")]
            table.add_row(rate, variant, *cells)
    Console().print(table)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
