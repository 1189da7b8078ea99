"""Injects each fault into each kind of process in each phase of a request.

    python -m tests.faults.fault_matrix [--role R] [--fault F] [--phase P] [--layout any] [--quick] [--json FILE]

{prefill, decode, proxy, media cache} x {SIGKILL, SIGSTOP, SIGSTOP then SIGCONT, SIGTERM} x {queued, prefilling,
shipping, first token, decoding, finishing}, decode workers during local prefill, and clients that disconnect in each
phase. The cluster has two workers of each role or two elastic ones, two proxies, a media cache and a tiny model that
takes images; requests have an image where the media cache is hit. `tests.faults.matrix` states the expected outcomes.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, get_args

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.support.report import Aim, Report, finish, new_parser
from tests.faults.fault_cases import Case, Layout, Result, all_cases
from tests.faults.matrix import Matrix, matrix

QUICK = (
    Case("prefill", "SIGKILL", "shipping"),
    Case("decode", "SIGSTOP then SIGCONT", "decoding"),
    Case("proxy", "SIGKILL", "decoding"),
    Case("media cache", "SIGKILL", "prefilling"),
)


def run_cases(running: Matrix, cases: list[Case]) -> list[Result]:
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("fault matrix", total=len(cases))
        for case in cases:
            progress.update(task, description=str(case))
            try:
                result = running.run(case)
            except AssertionError as error:
                result = Result(case, "not completed", False, "", 0.0, 0.0, 0, 0, None, [str(error)])
            results.append(result)
            print(f"{case}: {result.outcome}", *result.problems, sep="; ", flush=True)
            progress.advance(task)
    return results


def table(results: list[Result]) -> Table:
    shown = Table("process", "fault", "phase", "request", "pause s", "recovery s", "attempts", "problems")
    for result in results:
        case = result.case
        shown.add_row(
            case.role, case.fault, case.phase, result.outcome, f"{result.pause_s:.1f}", f"{result.whole_s:.1f}",
            str(result.num_attempts), "; ".join(result.problems),
        )  # fmt: skip
    return shown


def figures(results: list[Result]) -> dict[str, Any]:
    by_fault: dict[str, list[Result]] = {}
    for each in results:
        by_fault.setdefault(f"{each.case.role}, {each.case.fault}", []).append(each)
    recovery = {
        fault: {"max_pause_s": max(each.pause_s for each in of), "max_recovery_s": max(each.whole_s for each in of)}
        for fault, of in by_fault.items()
    }
    return {
        "load_average": round(os.getloadavg()[0], 2),
        "cases": len(results),
        "recovery": recovery,
        "results": [msgspec.to_builtins(each) for each in results],
    }


def main() -> None:
    parser = new_parser(__doc__)
    for name in ("role", "fault", "phase"):
        choices = dict.fromkeys(getattr(case, name) for case in all_cases("fixed"))
        parser.add_argument(f"--{name}", choices=list(choices), help="run only these cases")
    parser.add_argument("--connector", default="auto", help="KV connector of the cluster (default: %(default)s)")
    parser.add_argument(
        "--layout", choices=get_args(Layout), default="fixed", help="two workers of each role, or two elastic ones"
    )
    options = parser.parse_args()
    cases = [
        case
        for case in (QUICK if options.quick else all_cases(options.layout))
        if all(getattr(options, name) in (None, getattr(case, name)) for name in ("role", "fault", "phase"))
    ]
    if not cases:
        parser.error("no case matches these options")
    with tempfile.TemporaryDirectory() as folder, matrix(Path(folder), options.connector, options.layout) as running:
        results = run_cases(running, cases)
    Console().print(table(results))
    finish(report(results), options.json)


def report(results: list[Result]) -> Report:
    failed = [each for each in results if each.outcome != "length" and not each.case.may_fail]
    aims = [
        Aim.of("failed requests, except those of killed proxies", len(failed), 0, "lower"),
        Aim.of("responses with wrong tokens", sum(not each.is_same for each in results), 0, "lower"),
        Aim.of("cases with any problem", sum(bool(each.problems) for each in results), 0, "lower"),
    ]
    return Report.of("fault_matrix", figures(results), aims)


if __name__ == "__main__":
    main()
