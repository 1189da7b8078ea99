"""Runs the benchmarks one after the other and writes REPORT.md with tables.

python -m bench.all                    all that need neither a GPU nor vLLM; writes to bench/results
python -m bench.all --quick            a few short ones, in less than five minutes; writes to bench/results/quick
python -m bench.all --report-only      only makes the page from existing JSON files
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.progress import track

from bench.support.report import page, read_reports

RESULTS = Path(__file__).parent / "results"
BENCHMARKS = (
    "router_decisions", "pd_study", "autoscale",
    "engine", "kv_transfer", "kv_tiers", "disaggregation", "event_loop", "media_storm",
)  # fmt: skip
QUICK = ("router_decisions", "autoscale", "kv_transfer")
"""Benchmarks whose short runs are meaningful."""
QUICK_LIMIT_S = 90.0
LIMIT_S = 3600.0
_STOP_TIMEOUT_S = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short runs of a few benchmarks")
    parser.add_argument("--only", default="", metavar="NAMES", help="comma-separated benchmarks")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the results and REPORT.md")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the cleanup that stops a benchmark
    out = options.out or (RESULTS / "quick" if options.quick else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    names = options.only.split(",") if options.only else list(QUICK if options.quick else BENCHMARKS)
    if unknown := set(names) - set(BENCHMARKS):
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}; choose from {', '.join(BENCHMARKS)}")
    failed = {} if options.report_only else run_all(names, out, options.quick)
    reports = read_reports(out)
    (out / "REPORT.md").write_text(page(reports, failed, "Benchmark results"))
    print(f"wrote {out / 'REPORT.md'}")
    sys.exit(1 if failed else 0)


def run_all(names: list[str], out: Path, quick: bool) -> dict[str, str]:
    """Runs each benchmark with its output in NAME.log. Returns the failed ones with the reason."""
    failed: dict[str, str] = {}
    for name in track(names, "benchmarks", console=Console(stderr=True)):
        if reason := run(name, out, quick):
            failed[name] = reason
    return failed


def run(name: str, out: Path, quick: bool) -> str:
    """Runs one benchmark in its own process. Returns the reason of a failure, or an empty string."""
    limit_s = QUICK_LIMIT_S if quick else LIMIT_S
    command = [sys.executable, "-m", f"bench.{name}", "--json", str(out / f"{name}.json"), *["--quick"] * quick]
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"not finished after {limit_s:.0f} s"
        finally:
            process.terminate()  # it stops its servers
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)
            process.kill()
            process.wait()
    return "" if status == 0 else f"exit status {status}, see {name}.log"


if __name__ == "__main__":
    main()
