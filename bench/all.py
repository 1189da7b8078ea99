"""Runs the benchmarks one after the other, and writes REPORT.md with tables and plots: `make bench`.

python -m bench.all                    all that need neither a GPU nor vLLM; results go to bench/results
python -m bench.all --quick            a few, each short, under five minutes; results go to bench/results/quick
python -m bench.all --report-only      the page alone, from the JSON that is there
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.report_page import draw, page, read_reports

RESULTS = Path(__file__).parent / "results"
BENCHMARKS = (
    "router_decisions", "router_policies", "autoscale_simulation", "engine", "kv_transfer", "grammar",
    "proxy_cpu", "decode_prefill", "disaggregation", "pd_study", "event_loop", "overload", "chaos", "fault_matrix",
    "exam", "media_alloc", "media_storm", "mixed_load", "fuzz",
)  # fmt: skip
QUICK = ("router_decisions", "autoscale_simulation", "kv_transfer", "grammar")
"""Those whose short runs tell something."""
QUICK_BUDGET_S = 280.0
QUICK_LIMIT_S = 120.0
"""Of one, so that where the machine is slow the others still get their turn."""
LIMIT_S = 3600.0


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short runs of a few benchmarks")
    parser.add_argument("--only", default="", metavar="NAMES", help="these, with commas between")
    parser.add_argument(
        "--peers", nargs=3, metavar=("PEERS", "VLLM", "MODEL"), help="run load_agreement and side_by_side too"
    )
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where results and REPORT.md go")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    out = options.out or (RESULTS / "quick" if options.quick else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    failed = {} if options.report_only else run_all(plan(options), out, options.quick)
    reports = read_reports(out)
    title = "Benchmarks, in short" if options.quick else "Benchmarks"
    (out / "REPORT.md").write_text(page(reports, failed, draw(reports, out / "plots"), title))
    print(f"wrote {out / 'REPORT.md'}")
    sys.exit(1 if failed else 0)


def plan(options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Names and arguments; of the present ones, those that are asked for. Exits where one is unknown."""
    present = [name for name in BENCHMARKS if (Path(__file__).parent / f"{name}.py").exists()]
    chosen = (
        options.only.split(",") if options.only else [name for name in present if not options.quick or name in QUICK]
    )
    unknown = [name for name in chosen if name not in present]
    if unknown:
        raise SystemExit(f"there is no benchmark {unknown[0]!r}; choose from {', '.join(present)}")
    planned: list[tuple[str, list[str]]] = [(name, ["--quick"] if options.quick else []) for name in chosen]
    if options.peers:
        peers, vllm, model = options.peers
        planned.append(("load_agreement", ["--vllm", vllm, *(["--quick"] if options.quick else [])]))
        planned.append(("side_by_side", ["--peers", peers, "--vllm", vllm, "--model", model]))
    return planned


def run_all(planned: list[tuple[str, list[str]]], out: Path, quick: bool) -> dict[str, str]:
    """Output goes to NAME.log in `out`. Returns what failed, and why."""
    failed: dict[str, str] = {}
    started_at = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("benchmarks", total=len(planned))
        for name, arguments in planned:
            progress.update(task, description=name)
            left_s = QUICK_BUDGET_S - (time.monotonic() - started_at) if quick else LIMIT_S
            reason = (
                run(name, arguments, out, min(left_s, QUICK_LIMIT_S if quick else LIMIT_S))
                if left_s > 0
                else "no time was left"
            )
            if reason:
                failed[name] = reason
            progress.advance(task)
    return failed


def run(name: str, arguments: list[str], out: Path, limit_s: float) -> str:
    """One benchmark in a process of its own. Returns why it failed, or nothing."""
    log = out / f"{name}.log"
    command = [sys.executable, "-m", f"bench.{name}", "--json", str(out / f"{name}.json"), *arguments]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            returncode = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"it took more than {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    return "" if returncode == 0 else f"exit code {returncode}, see {log.name}"


if __name__ == "__main__":
    main()
