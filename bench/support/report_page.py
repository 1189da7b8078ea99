"""Makes one Markdown page, with plots, from the JSON reports of all benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from bench.support.report import Report

MAX_AIMS_PLOTTED = 24


def page(reports: dict[str, Report], failed: dict[str, str], plots: dict[str, str], title: str) -> str:
    """Returns Markdown.

    `reports` and `plots` (paths relative to the page) are by file name, `failed` maps a benchmark to its error.
    """
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
        if name in plots:
            lines += [f"![{name}]({plots[name]})", ""]
        if not report.aims:
            lines.append(f"No aims; see the figures in `{name}.json`.")
            continue
        lines += ["| figure | value | aim | met |", "| --- | --- | --- | --- |"]
        for aim in report.aims:
            sign = "at most" if aim.better == "lower" else "at least"
            lines.append(f"| {aim.name} | {aim.value:.3g} | {sign} {aim.aim:.3g} | {'yes' if aim.met else 'no'} |")
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


def draw(reports: dict[str, Report], folder: Path) -> dict[str, str]:
    """Draws the aims of each report. Returns plot paths relative to the parent of `folder`, by report."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, report in reports.items():
        if report.aims:
            figure = _draw_aims(plt, report)
            figure.savefig(folder / f"{name}.png", dpi=100, bbox_inches="tight")
            plt.close(figure)
            drawn[name] = f"{folder.name}/{name}.png"
    return drawn


def _draw_aims(plt: Any, report: Report) -> Any:
    """Draws the ratio of each value to its aim, for the worst MAX_AIMS_PLOTTED; left of the line is better."""
    ratios = [_ratio_to_aim(aim.value, aim.aim, aim.better) for aim in report.aims]
    worst = sorted(range(len(ratios)), key=lambda i: -ratios[i])[:MAX_AIMS_PLOTTED]
    shown = [(report.aims[i], ratios[i]) for i in sorted(worst)]
    figure, axes = plt.subplots(figsize=(9, 0.6 + 0.3 * len(shown)))
    colors = ["#0b7f6b" if aim.met else "#c3312b" for aim, _ in shown]
    axes.barh([aim.name for aim, _ in shown], [ratio for _, ratio in shown], color=colors)
    axes.axvline(1.0, color="#5d636f", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("value / aim (aim / value where higher is better); 1 or less meets the aim")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _ratio_to_aim(value: float, aim: float, better: str) -> float:
    over, under = (value, aim) if better == "lower" else (aim, value)
    return min(5.0, over / under) if under else (5.0 if over else 0.0)
