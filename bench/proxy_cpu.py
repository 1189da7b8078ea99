"""What a streamed token costs the proxy in CPU time: 64 streams at once, 128 tokens in and 128 out, the noise model.

Its user and system time, all threads, from before the first request to after the last answer, over the tokens streamed.
So the requests' own costs (HTTP, reading bodies, dispatch) are in it. Its reading processes are told apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.event_loop import MODEL, cluster
from bench.process_cpu import children, cpu_s, system_s
from bench.report import Aim, Report, add_common_options, finish


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.proxy_cpu", description=__doc__)
    parser.add_argument("--num-streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--api", choices=["completions", "chat"], action="append")
    parser.add_argument("--rounds", type=int, default=5, help="figures are medians of so many")
    parser.add_argument("--profile", type=Path, metavar="PY_SPY", help="record with it, to proxy_cpu.raw")
    add_common_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.output_len = 1, 32
    figures: dict[str, Any] = {}
    with cluster(num_threads=2, num_streams=options.num_streams) as (port, _, proxy_pid):
        for api in options.api or ["completions", "chat"]:
            measure(options, api, port, proxy_pid)  # warm-up, not counted
            rounds = [measure(options, api, port, proxy_pid) for _ in range(options.rounds)]
            figures[api] = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    table = Table("api", *next(iter(figures.values())))
    for api, values in figures.items():
        table.add_row(api, *(f"{value:.1f}" for value in values.values()))
    Console(width=130).print(table)
    name = "CPU time of the proxy per streamed token, us"
    wanted = [Aim.of(f"{name}, {api}", values["us_per_token"], 40, "lower") for api, values in figures.items()]
    finish(Report.of("proxy_cpu", figures, wanted), options.json)


def measure(options: argparse.Namespace, api: str, port: int, proxy_pid: int) -> dict[str, float]:
    """One burst of streams."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "load.json"
        command = [
            sys.executable, "-m", "bench.load", "--url", f"http://127.0.0.1:{port}", "--model", MODEL, "--api", api,
            "--num-prompts", str(options.num_streams), "--request-rate", "inf", "--input-len", str(options.input_len),
            "--output-len", str(options.output_len), "--json", str(file),
        ]  # fmt: skip
        before, system_before = cpu_s(proxy_pid), system_s(proxy_pid)
        readers_before = sum(map(cpu_s, children(proxy_pid)))
        spy = profiler(options.profile, proxy_pid) if options.profile else None
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
        used, system_used = cpu_s(proxy_pid) - before, system_s(proxy_pid) - system_before
        readers_used = sum(map(cpu_s, children(proxy_pid))) - readers_before
        if spy is not None:
            spy.wait()
        figures = json.loads(file.read_text())["figures"]["load"]
    if figures["num_completed"] != options.num_streams:
        raise SystemExit(f"requests failed: {figures['errors']}")
    num_tokens = figures["output_tokens_per_s"] * figures["duration_s"]
    return {
        "us_per_token": used * 1e6 / num_tokens,
        "us_per_token in the kernel": system_used * 1e6 / num_tokens,
        "us_per_token in readers": readers_used * 1e6 / num_tokens,
        "tokens": num_tokens,
        "tokens/s": figures["output_tokens_per_s"],
        "ttft mean ms": figures["ttft_ms"]["mean"],
        "itl mean ms": figures["itl_ms"]["mean"],
    }


def profiler(py_spy: Path, pid: int) -> subprocess.Popen[bytes]:
    command = [str(py_spy), "record", "-p", str(pid), "-r", "300", "-d", "6", "-f", "raw", "-o", "proxy_cpu.raw"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
