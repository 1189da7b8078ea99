"""What the rows of `bench.pd_study` say: which configuration is best where, and a plot. Pure."""

from __future__ import annotations

from typing import Any

COLORS = {"1 engine": "#9aa1ad", "2 engines": "#5d636f", "1P1D": "#0b7f6b", "2P1D": "#2563c9", "1P2D": "#d08700"}
PANELS = (
    ("good", "requests within both limits, %", ""),
    ("ttft_ms_p50", "TTFT p50, % of its limit", "ttft_ms_at_most"),
    ("itl_ms_p99", "ITL p99, % of the limit of TPOT", "tpot_ms_at_most"),
)
"""Of a row, its title, and the limit that it is told in."""


def draw_pd_study(plt: Any, figures: dict[str, Any]) -> Any:
    """A row of panels for each load. plt: matplotlib.pyplot."""
    rows, calibrations = figures["rows"], figures["calibrations"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    names = [name for name in COLORS if any(row["configuration"] == name for row in rows)]
    loads = sorted({row["load"] for row in rows})
    value = {(row["load"], row["shape"], row["configuration"]): row for row in rows}
    figure, axes = plt.subplots(len(loads), len(PANELS), figsize=(13, 3.2 * len(loads)), squeeze=False)
    width = 0.8 / len(names)
    for line, load in zip(axes, loads, strict=True):
        for panel, (key, title, limit) in zip(line, PANELS, strict=True):
            for number, name in enumerate(names):
                limits = [calibrations[shape][limit] if limit else 1.0 for shape in shapes]
                at = [index + (number - (len(names) - 1) / 2) * width for index in range(len(shapes))]
                rows_here = [value[load, shape, name] for shape in shapes]
                heights = [100 * row[key] / most for row, most in zip(rows_here, limits, strict=True)]
                panel.bar(at, heights, width, color=COLORS[name], label=name)
            if limit:
                panel.axhline(100, color="#c3312b", linewidth=0.8)
            panel.set_xticks(range(len(shapes)), shapes)
            panel.set_title(f"{title}, at a load of {load:g}", fontsize=10)
            panel.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(names), frameon=False, title="prompt:output tokens")
    figure.tight_layout(rect=(0, 0.4 / (3.2 * len(loads)), 1, 1))
    return figure


def pd_table(figures: dict[str, Any]) -> list[str]:
    """Lines of Markdown."""
    columns = {
        "shape": "prompt:output", "load": "load", "configuration": "workers", "good": "within limits",
        "goodput_per_s_per_worker": "goodput/s of a worker", "tokens_per_s_per_worker": "output tokens/s of a worker",
        "ttft_ms_p50": "TTFT p50 ms", "ttft_ms_p99": "p99", "itl_ms_p50": "ITL p50 ms", "itl_ms_p99": "p99",
    }  # fmt: skip
    lines = [f"Cores for each worker: {figures['cores_per_worker']}.", ""]
    lines += [f"| {' | '.join(columns.values())} |", f"|{' --- |' * len(columns)}"]
    for row in sorted(figures["rows"], key=lambda row: (row["load"], row["shape"])):
        cells = [f"{row[key]:.0%}" if key == "good" else f"{row[key]}" for key in columns]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each shape and load: the best of those apart and of those that do both, by goodput per worker."""
    found = []
    for shape, load in dict.fromkeys((row["shape"], row["load"]) for row in rows):
        here = [row for row in rows if (row["shape"], row["load"]) == (shape, load)]
        apart = [row for row in here if "P" in row["configuration"]]
        both = [row for row in here if "P" not in row["configuration"]]
        if not apart or not both:
            continue
        best_apart, best_both = (max(group, key=lambda row: float(row["good"])) for group in (apart, both))
        found.append(
            {
                "shape": shape,
                "load": load,
                "best_apart": best_apart["configuration"],
                "good_apart": best_apart["good"],
                "best_both": best_both["configuration"],
                "good_both": best_both["good"],
                "itl_p99_apart_over_both": round(best_apart["itl_ms_p99"] / best_both["itl_ms_p99"], 2),
                "ttft_p50_apart_over_both": round(best_apart["ttft_ms_p50"] / best_both["ttft_ms_p50"], 2),
            }
        )
    return found
