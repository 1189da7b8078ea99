"""Result of a benchmark: command, machine, versions, date, commit, raw figures, and aims met or missed."""

from __future__ import annotations

import argparse
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from tandem.runtime.cores import num_cores

_PACKAGES = ("tandem-serve", "torch", "transformers", "tokenizers", "pyzmq", "msgspec", "uvloop", "locust")


class Aim(msgspec.Struct, frozen=True):
    """A measured value and its target, both in the unit that `name` states."""

    name: str
    value: float
    aim: float
    better: Literal["lower", "higher"]
    met: bool

    @classmethod
    def of(cls, name: str, value: float, aim: float, better: Literal["lower", "higher"]) -> Aim:
        return cls(name, value, aim, better, met=value <= aim if better == "lower" else value >= aim)


class Report(msgspec.Struct, frozen=True):
    """`measured_on` is an ISO date, `commit` the short hash of the code."""

    benchmark: str
    command: str
    machine: dict[str, str | int | float]
    versions: dict[str, str]
    figures: dict[str, Any]
    aims: list[Aim]
    measured_on: str = ""
    commit: str = ""

    @classmethod
    def of(cls, benchmark: str, figures: dict[str, Any], aims: list[Aim] | None = None) -> Report:
        arguments = [Path(a).name if Path(a).is_absolute() or Path(a).exists() else a for a in sys.argv[1:]]
        spec = sys.modules["__main__"].__spec__  # of the module that `python -m` runs
        command = " ".join(["python", "-m", spec.name if spec else benchmark, *arguments])
        return cls(
            benchmark,
            command,
            describe_machine(),
            describe_versions(),
            figures,
            aims or [],
            date.today().isoformat(),
            _commit(),
        )

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    def print_aims(self) -> None:
        if self.aims:
            table = Table("figure", "value", "aim", "met")
            for aim in self.aims:
                sign = "<=" if aim.better == "lower" else ">="
                table.add_row(aim.name, shown(aim.value), f"{sign} {shown(aim.aim)}", "yes" if aim.met else "NO")
            Console().print(table)


def describe_machine() -> dict[str, str | int | float]:
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or "unknown",
    )
    memory_kib = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": cpu,
        "cores": num_cores(),
        "memory_gib": round(memory_kib / 2**20, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def describe_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _commit() -> str:
    """Returns the short hash of HEAD, or nothing outside of a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text().splitlines()
    except OSError:
        return []


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Makes a benchmark's parser. SIGTERM ends the process by SystemExit, so that servers are stopped."""
    spec = sys.modules["__main__"].__spec__
    parser = argparse.ArgumentParser(
        prog=f"python -m {spec.name}" if spec else None,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="short run that only shows that the benchmark works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return parser


def log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table with a column for each key of any row. Numbers have three digits, or all before the point."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns)
    for row in rows:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    Console(width=150).print(table)


def _cell(value: object) -> str:
    return shown(value) if isinstance(value, float) else str(value)


def shown(value: float) -> str:
    """Returns three digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def finish(report: Report, file: Path | None) -> None:
    """Prints the aims and writes the report."""
    report.print_aims()
    if file is not None:
        report.write(file)
        print(f"wrote {file}")


def page(reports: dict[str, Report], failed: dict[str, str], title: str) -> str:
    """Returns Markdown. `reports` are by file name, `failed` maps a benchmark to its error."""
    lines = [
        f"# {title}",
        "",
        "Compare figures of one run only: machines differ and are shared.",
        "",
        "| benchmark | aims met | measured on | commit | command |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, report in reports.items():
        met = f"{sum(aim.met for aim in report.aims)} of {len(report.aims)}" if report.aims else "no aims"
        cells = (f"[{name}](#{name})", met, report.measured_on, report.commit, f"`{report.command}`")
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| {name} | failed: {reason} | | | `python -m bench.{name}` |" for name, reason in failed.items()]
    for name, report in reports.items():
        lines += ["", f"## {name}", ""]
        lines += [f"Machine: {_listed(report.machine)}. Versions: {_listed(report.versions)}.", ""]
        if not report.aims:
            lines.append(f"No aims; see the figures in `{name}.json`.")
            continue
        lines += ["| figure | value | aim | met |", "| --- | --- | --- | --- |"]
        for aim in report.aims:
            sign = "at most" if aim.better == "lower" else "at least"
            lines.append(
                f"| {aim.name} | {shown(aim.value)} | {sign} {shown(aim.aim)} | {'yes' if aim.met else 'no'} |"
            )
    return "\n".join(lines) + "\n"


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def read_reports(folder: Path) -> dict[str, Report]:
    """Reads all reports of a folder, by file name without suffix. Raises SystemExit for a file of another form."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        try:
            found[file.stem] = msgspec.json.decode(file.read_bytes(), type=Report)
        except msgspec.ValidationError as error:
            raise SystemExit(f"{file} is not a benchmark report: {error}") from error
    return found
