"""From the JSON of all benchmarks to one page: what others reported beside what was measured, every aim, and plots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.pd_figures import draw_pd_study, pd_table
from bench.report import Report

MAX_AIMS_PLOTTED = 24


@dataclass(frozen=True)
class Reported:
    """A result of another project: source, case and what it reported. measured(figures): ours, in words."""

    source: str
    case: str
    told: str
    benchmark: str
    measured: Callable[[dict[str, Any]], str] | None = None


def _event_loop(figures: dict[str, Any]) -> str:
    parts = []
    for threads, runs in figures.items():
        for name in ("idle", "completions"):
            spread = runs.get(name, {}).get("poll_ms", {}).get("/health")
            if spread:
                parts.append(
                    f"{threads} tokenizer threads, {name}: p50 {spread['p50']:.1f}, p99 {spread['p99']:.1f}, "
                    f"max {spread['max']:.1f} ms"
                )
    return "; ".join(parts)


REPORTED = (
    Reported(
        "vLLM #10635",
        "/health while 60 prompts of some 300,000 tokens are tokenised",
        "17.8 s before; 2.7-4.8 ms after (idle 2.3)",
        "event_loop",
        _event_loop,
    ),
    Reported(
        "vLLM #33337",
        "Poisson 5 to 100 requests/s, 40 % text, 30 % video, 30 % image, 10 s client time-out",
        "errors 11.83 % at 50/s to 0; p99 TTFT -37 % at 20/s",
        "mixed_load",
    ),
    Reported(
        "vLLM #34789",
        "500 image prompts, 300 at once",
        "/health median 222 ms to under 1 ms; text alone unchanged",
        "media_storm",
    ),
    Reported(
        'LightLLM "optimise multimodal resource allocation"',
        "n images of 644x364, 4 to 128 in a request",
        "RPC 43 ms to 1.0-2.2; whole function 130-143 ms to 5.9-26.4",
        "media_alloc",
    ),
)


def page(reports: dict[str, Report], failed: dict[str, str], plots: dict[str, str], title: str) -> str:
    """Markdown. reports and plots: by the benchmark's name, plots as paths beside the page. failed: name to why."""
    lines = [f"# {title}", ""]
    first = next(iter(reports.values()), None)
    if first is not None:
        machine = ", ".join(f"{name} {value}" for name, value in first.machine.items())
        versions = ", ".join(f"{name} {value}" for name, value in first.versions.items())
        lines += [f"Machine: {machine}.", "", f"Versions: {versions}.", ""]
    lines += [
        "Figures of one run can be compared with each other; machines are noisy and differ.",
        "",
        "## Beside what others reported",
        "",
        "| source | case | reported | measured here |",
        "| --- | --- | --- | --- |",
    ]
    for row in REPORTED:
        lines.append(f"| {row.source} | {row.case} | {row.told} | {_measured(row, reports)} |")
    lines += ["", "## Aims", "", "| benchmark | met | command |", "| --- | --- | --- |"]
    for name, report in reports.items():
        met = f"{sum(aim.met for aim in report.aims)} of {len(report.aims)}" if report.aims else "sets none"
        lines.append(f"| [{name}](#{name}) | {met} | `{report.command}` |")
    lines += [f"| {name} | did not run: {reason} | `python -m bench.{name}` |" for name, reason in failed.items()]
    for name, report in reports.items():
        lines += ["", f"## {name}", ""]
        if name in plots:
            lines += [f"![{name}]({plots[name]})", ""]
        if name == "pd_study":
            lines += pd_table(report.figures)
        elif report.aims:
            lines += ["| figure | value | wanted | met |", "| --- | --- | --- | --- |"]
            for aim in report.aims:
                sign = "at most" if aim.better == "lower" else "at least"
                lines.append(f"| {aim.name} | {aim.value:.3g} | {sign} {aim.aim:.3g} | {'yes' if aim.met else 'no'} |")
        else:
            lines.append("Its figures are in its JSON.")
    return "\n".join(lines) + "\n"


def _measured(row: Reported, reports: dict[str, Report]) -> str:
    report = reports.get(row.benchmark)
    if report is None:
        return f"not measured here; `python -m bench.{row.benchmark}`"
    if row.measured is not None:
        return row.measured(report.figures)
    return (
        "; ".join(f"{aim.name}: {aim.value:.3g}" for aim in report.aims) or f"see [{row.benchmark}](#{row.benchmark})"
    )


def read_reports(folder: Path) -> dict[str, Report]:
    """By file name, those that are reports."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        try:
            found[file.stem] = msgspec.json.decode(file.read_bytes(), type=Report)
        except msgspec.ValidationError as error:
            raise SystemExit(f"{file} is no benchmark's report: {error}") from error
    return found


def draw(reports: dict[str, Report], folder: Path) -> dict[str, str]:
    """Plots of what has aims, and of pd_study. File names by benchmark, relative to folder's parent."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, report in reports.items():
        if name == "pd_study":
            figure = draw_pd_study(plt, report.figures)
        elif report.aims:
            figure = _draw_aims(plt, report)
        else:
            continue
        figure.savefig(folder / f"{name}.png", dpi=100, bbox_inches="tight")
        plt.close(figure)
        drawn[name] = f"{folder.name}/{name}.png"
    return drawn


def _draw_aims(plt: Any, report: Report) -> Any:
    """How far figures are from their aims, of many those that are worst; to the left of the line is better."""
    told = [(_badness(aim.value, aim.aim, aim.better), number) for number, aim in enumerate(report.aims)]
    shown = sorted(number for _, number in sorted(told, reverse=True)[:MAX_AIMS_PLOTTED])
    aims, ratios = [report.aims[number] for number in shown], [told[number][0] for number in shown]
    figure, axes = plt.subplots(figsize=(9, 0.6 + 0.3 * len(aims)))
    axes.barh([aim.name for aim in aims], ratios, color=["#0b7f6b" if aim.met else "#c3312b" for aim in aims])
    axes.axvline(1.0, color="#5d636f", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("figure over aim (aim over figure where more is better); 1 and less is met")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _badness(value: float, aim: float, better: str) -> float:
    over, under = (value, aim) if better == "lower" else (aim, value)
    return min(5.0, over / under) if under else 5.0
