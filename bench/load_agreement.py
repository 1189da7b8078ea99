"""Whether our TTFT, TPOT and ITL are those of `vllm bench serve`: both clients on one cluster, at the same time.

`python -m bench.load_agreement --vllm VENV [--quick] [--json FILE]`; VENV is a virtual environment with vLLM.

Twice. First one run read twice: vLLM's client reads its streams and reckons its figures; what it read, byte for byte
and with times, is read again by `bench.latency`. Then two runs beside each other: locust with `bench/locustfile.py` and
vLLM's client keep as many requests under way each, of the same shape and in the same seconds, and see the same cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.latency import SLO, LoadFigures, RequestTrace, goodput, read_events, summarise
from bench.noise_model import ensure_noise_model
from bench.report import Aim, Report, add_common_options, finish
from tests.support.cluster import MODEL, Cluster

MOST_APART = 0.02
NUM_WORDS, NUM_OUTPUT_TOKENS, NUM_USERS = 100, 64, 4
WORDS = ("value", "list", "object", "class", "name", "module", "statement", "function", "attribute", "method", "type")
SLO_MS = {"ttft": 60.0, "tpot": 8.0}
VLLM_START_S = 300.0


class KeptStream(msgspec.Struct):
    """As `bench.vllm_recorder` writes it. pieces: (time, text) of what was read."""

    sent_at: float
    status: int
    pieces: list[tuple[float, str]]

    def trace(self) -> RequestTrace:
        """As our clients would have made it of the same bytes at the same times."""
        trace = RequestTrace(self.sent_at)
        now = self.sent_at

        def lines() -> Iterator[bytes]:
            nonlocal now
            begun = ""
            for read_at, text in self.pieces:
                now = read_at
                *whole, begun = (begun + text).split("\n")
                yield from (line.encode() for line in whole)

        read_events(lines(), trace, lambda: now)
        return trace


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.load_agreement", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, required=True, help="virtual environment with vLLM")
    parser.add_argument("--num-prompts", type=int, default=1200, help="of vLLM's client")
    add_common_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.num_prompts = 60
    with tempfile.TemporaryDirectory() as name, Cluster() as cluster:
        folder = Path(name)
        told, streams, beside = run(options, cluster, folder)
    once = [stream.trace() for stream in streams]
    rows = same_streams(told, once) + beside_each_other(once, beside)
    table = Table("how", "figure", "vLLM", "ours", "apart")
    for row in rows:
        table.add_row(row["how"], row["figure"], f"{row['vllm']:.3f}", f"{row['ours']:.3f}", f"{row['apart']:.2%}")
    Console().print(table)
    figures = {
        "requests": {"vllm": len(once), "locust": len(beside)},
        "users": NUM_USERS,
        "output_tokens": NUM_OUTPUT_TOKENS,
        "rows": rows,
    }
    finish(Report.of("load_agreement", figures, aims(rows)), options.json)


def run(
    options: argparse.Namespace, cluster: Cluster, folder: Path
) -> tuple[dict[str, Any], list[KeptStream], list[RequestTrace]]:
    """What vLLM's client tells, the streams it read, and locust's traces."""
    rng = random.Random(0)
    for name, number in (("vllm", options.num_prompts), ("locust", 4 * options.num_prompts)):
        lines = (json.dumps({"prompt": " ".join(rng.choices(WORDS, k=NUM_WORDS))}) for _ in range(number))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    kept, result, traces = folder / "streams.json", folder / "result.json", folder / "traces.json"
    with process(vllm_command(options, cluster.url, folder, kept, result)) as vllm:
        wait_for_requests(cluster, vllm)
        with process(locust_command(cluster.url, folder, traces)) as locust:
            code = vllm.wait(3600)
            locust.send_signal(signal.SIGTERM)  # which it takes as the end of its run
            locust.wait(60)
    if code:
        raise SystemExit(f"vllm bench serve ended with {code}")
    told = json.loads(result.read_text())
    streams = msgspec.json.decode(kept.read_bytes(), type=list[KeptStream])
    return told, streams, msgspec.json.decode(traces.read_bytes(), type=list[RequestTrace])


def vllm_command(options: argparse.Namespace, url: str, folder: Path, kept: Path, result: Path) -> list[str]:
    return [
        str(options.vllm / "bin" / "python"), "-m", "bench.vllm_recorder", str(kept),
        "--backend", "openai", "--base-url", url, "--model", MODEL, "--tokenizer", str(ensure_noise_model()),
        "--dataset-name", "custom", "--dataset-path", str(folder / "vllm.jsonl"), "--skip-chat-template",
        "--disable-shuffle", "--custom-output-len", str(NUM_OUTPUT_TOKENS), "--ignore-eos",
        "--num-prompts", str(options.num_prompts), "--max-concurrency", str(NUM_USERS),
        "--ready-check-timeout-sec", "0", "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99",
        "--goodput", *(f"{name}:{bound}" for name, bound in SLO_MS.items()),
        "--save-result", "--save-detailed", "--result-dir", str(result.parent), "--result-filename", result.name,
    ]  # fmt: skip


def locust_command(url: str, folder: Path, traces: Path) -> list[str]:
    return [
        sys.executable, "-m", "locust", "-f", str(Path(__file__).parent / "locustfile.py"), "--headless",
        "--users", str(NUM_USERS), "--spawn-rate", "100", "--host", url, "--model", MODEL, "--stop-timeout", "10",
        "--output-len", str(NUM_OUTPUT_TOKENS), "--prompts", str(folder / "locust.jsonl"), "--traces", str(traces),
        "--only-summary", "--loglevel", "WARNING",
    ]  # fmt: skip


@contextlib.contextmanager
def process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    env = {**os.environ, "VLLM_TARGET_DEVICE": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
    started = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    try:
        yield started
    finally:
        if started.poll() is None:
            started.terminate()
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def wait_for_requests(cluster: Cluster, vllm: subprocess.Popen[bytes]) -> None:
    """Until vLLM's client sends: it takes long to start."""
    deadline = time.monotonic() + VLLM_START_S
    while not cluster.status().num_requests:
        if vllm.poll() is not None:
            raise SystemExit(f"vllm bench serve ended with {vllm.returncode} before it sent anything")
        if time.monotonic() > deadline:
            raise SystemExit(f"vllm bench serve has sent nothing within {VLLM_START_S:.0f} s")
        time.sleep(0.2)


# ---- the comparison


def same_streams(told: dict[str, Any], traces: list[RequestTrace]) -> list[dict[str, Any]]:
    """Every figure that both have, of one run."""
    figures = summarise(traces)
    slo = SLO(SLO_MS["ttft"] / 1e3, SLO_MS["tpot"] / 1e3)
    pairs = [
        ("completed", told["completed"], figures.num_completed),
        ("output tokens", told["total_output_tokens"], sum(trace.num_output_tokens for trace in traces)),
        ("requests/s", told["request_throughput"], figures.requests_per_s),
        ("output tokens/s", told["output_throughput"], figures.output_tokens_per_s),
        ("goodput/s", told["request_goodput"], goodput(traces, slo)),
    ]
    for name, ours in spreads(figures).items():
        kind = {"e2e": "e2el"}.get(name, name)
        for statistic, theirs in (("mean", "mean"), ("p50", "median"), ("p99", "p99")):
            pairs.append((f"{statistic} {name.upper()}", told[f"{theirs}_{kind}_ms"], getattr(ours, statistic)))
    return [row("one run read twice", *pair) for pair in pairs]


def beside_each_other(vllm: list[RequestTrace], locust: list[RequestTrace]) -> list[dict[str, Any]]:
    """Means and medians of what both sent in the seconds in which both were at it; their clock is the host's."""
    begin = max(min(trace.sent_at for trace in traces) for traces in (vllm, locust))
    end = min(max(trace.sent_at for trace in traces) for traces in (vllm, locust))
    theirs, ours = (
        spreads(summarise([trace for trace in traces if begin <= trace.sent_at <= end])) for traces in (vllm, locust)
    )
    return [
        row("side by side", f"{statistic} {name.upper()}", getattr(theirs[name], statistic), getattr(each, statistic))
        for name, each in ours.items()
        for statistic in ("mean", "p50")
    ]


def spreads(figures: LoadFigures) -> dict[str, Any]:
    return {"ttft": figures.ttft_ms, "tpot": figures.tpot_ms, "itl": figures.itl_ms, "e2e": figures.e2e_ms}


def row(how: str, figure: str, vllm: float, ours: float) -> dict[str, Any]:
    apart = abs(ours - vllm) / abs(vllm) if vllm else float(ours != vllm)
    return {"how": how, "figure": figure, "vllm": float(vllm), "ours": float(ours), "apart": apart}


def aims(rows: list[dict[str, Any]]) -> list[Aim]:
    """The farthest apart of one run; each figure of two."""
    one = [each for each in rows if each["how"] == "one run read twice"]
    farthest = max(one, key=lambda each: float(each["apart"]))
    found = [Aim.of(f"one run read twice, the farthest: {farthest['figure']}", farthest["apart"], MOST_APART, "lower")]
    for each in rows:
        if each not in one:
            found.append(Aim.of(f"side by side: {each['figure']}", each["apart"], MOST_APART, "lower"))
    return found


if __name__ == "__main__":
    main()
