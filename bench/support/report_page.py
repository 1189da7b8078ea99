"""Makes one Markdown page from the JSON reports of all benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from bench.support.report import Report, shown


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
