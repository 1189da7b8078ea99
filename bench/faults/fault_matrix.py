"""Strikes each kind of process in each way in each phase of a request: `python -m bench.faults.fault_matrix`.

{prefill, decode, proxy, media cache} x {SIGKILL, SIGSTOP, SIGSTOP then SIGCONT, SIGTERM} x {queued, prefilling,
shipping, first token, decoding, finishing}, decode workers while they compute a prompt themselves, and clients that go
in each phase; on a cluster of two workers of each role, two proxies and a media cache, with a tiny model that takes
images. Where the media cache is struck, the request has an image. Reports what became of the request, how long it
paused, when the cluster was whole again, and what was leaked. `tests.faults.matrix` has the rules.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.support.report import Aim, Report, add_common_options, finish
from tests.faults.matrix import Case, Matrix, Result, all_cases, matrix

QUICK = (
    Case("prefill", "SIGKILL", "shipping"),
    Case("decode", "SIGSTOP then SIGCONT", "decoding"),
    Case("proxy", "SIGKILL", "decoding"),
    Case("media cache", "SIGKILL", "prefilling"),
)


def go_through(
    running: Matrix, cases: list[Case], results: list[Result], on_result: Callable[[list[Result]], None]
) -> None:
    """results: are added to. on_result: called after each case, with all that there are."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("fault matrix", total=len(cases))
        for case in cases:
            progress.update(task, description=str(case))
            try:
                result = running.run(case)
            except AssertionError as error:
                result = Result(case, "not run to its end", False, "", 0.0, 0.0, 0, 0, None, [str(error)])
            results.append(result)
            print(f"{case}: {result.outcome}", *result.problems, sep="; ", flush=True)
            on_result(results)
            progress.advance(task)


def table(results: list[Result]) -> Table:
    shown = Table("struck", "by", "in phase", "request", "pause s", "whole after s", "attempts", "problems")
    for result in results:
        case = result.case
        shown.add_row(
            case.role, case.fault, case.phase, result.outcome, f"{result.pause_s:.1f}", f"{result.whole_s:.1f}",
            str(result.num_attempts), "; ".join(result.problems),
        )  # fmt: skip
    return shown


def figures(results: list[Result]) -> dict[str, Any]:
    told: dict[str, list[Result]] = {}
    for each in results:
        told.setdefault(f"{each.case.role}, {each.case.fault}", []).append(each)
    recovery = {
        struck: {"pause_s_most": max(each.pause_s for each in of), "whole_s_most": max(each.whole_s for each in of)}
        for struck, of in told.items()
    }
    return {
        "load_average": round(os.getloadavg()[0], 2),
        "cases": len(results),
        "recovery": recovery,
        "results": [msgspec.to_builtins(each) for each in results],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("role", "fault", "phase"):
        choices = dict.fromkeys(getattr(case, name) for case in all_cases())
        parser.add_argument(f"--{name}", choices=list(choices), help="only this one")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="in another order: for a run that may be cut short")
    parser.add_argument("--resume", action="store_true", help="run what the file of --json lacks, or has with problems")
    parser.add_argument("--connector", default="auto", help="KV connector of the cluster (default: %(default)s)")
    add_common_options(parser)
    arguments = parser.parse_args()
    cases = [
        case
        for case in (QUICK if arguments.quick else all_cases())
        if all(wanted in (None, getattr(case, name)) for name, wanted in _filters(arguments))
    ]
    results: list[Result] = []
    if arguments.resume:
        if arguments.json is None or not arguments.json.exists():
            parser.error("--resume: there is no file of --json yet")
        told = msgspec.json.decode(arguments.json.read_bytes(), type=Report).figures["results"]
        results = [each for each in msgspec.convert(told, list[Result]) if not each.problems]
        cases = [case for case in cases if case not in [each.case for each in results]]
    if arguments.shuffle is not None:
        random.Random(arguments.shuffle).shuffle(cases)
    if not cases:
        parser.error("no case is left with these options; leave one of them out")
    with tempfile.TemporaryDirectory() as folder, matrix(Path(folder), arguments.connector) as running:
        go_through(running, cases, results, lambda so_far: write(so_far, arguments.json))
    Console().print(table(results))
    finish(report(results), arguments.json)


def write(results: list[Result], file: Path | None) -> None:
    """So far, for whoever cannot wait."""
    if file is not None:
        report(results).write(file)


def report(results: list[Result]) -> Report:
    failed = [each for each in results if each.outcome != "length" and not each.case.may_fail]
    aims = [
        Aim.of("failed requests, but for those of proxies that ended", len(failed), 0, "lower"),
        Aim.of("answers with other tokens", sum(not each.is_same for each in results), 0, "lower"),
        Aim.of("cases with a problem of any kind", sum(bool(each.problems) for each in results), 0, "lower"),
    ]
    return Report.of("fault_matrix", figures(results), aims)


def _filters(arguments: argparse.Namespace) -> list[tuple[str, str | None]]:
    return [(name, getattr(arguments, name)) for name in ("role", "fault", "phase")]


if __name__ == "__main__":
    main()
