"""Draws TTFT and ITL over the rate of requests, a line for each server, from a result of `bench.never_worse`.

    python -m bench.support.load_plot RESULT.json IMAGE [--shape 256/64]

Points are medians of the rounds, bars reach from the lowest round to the highest. The image is .svg or .png.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import matplotlib
import msgspec

from bench.support.report import Report

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PANELS = (
    ("ttft_ms_mean", "mean time to the first token, ms"),
    ("tpot_ms_mean", "mean time per output token, ms"),
    ("itl_ms_p99", "p99 gap between tokens, ms"),
)
SERVERS = {
    "vllm": ("one vLLM, two cores", "#8a8a8a", "s"),
    "1P1D": ("Tandem: one prefill, one decode worker", "#d9730d", "o"),
    "elastic-2": ("Tandem: two elastic workers", "#0b6e99", "^"),
    "elastic-1": ("Tandem: one elastic worker", "#0f7b6c", "v"),
}
"""Label, colour and marker."""

Runs = dict[str, dict[str, list[dict[str, Any]]]]
"""Figures by case, server and run."""


def draw(runs: Runs, shape: str, image: Path) -> None:
    """Draws the cases `shape`@RATE. Raises SystemExit if there are none."""
    rates = sorted(float(case.split("@")[1]) for case in runs if case.startswith(f"{shape}@"))
    if not rates:
        raise SystemExit(f"no case {shape}@RATE in this result; it has {', '.join(runs)}")
    figure, panels = plt.subplots(1, len(PANELS), figsize=(11, 3.4), layout="constrained")
    for panel, (name, title) in zip(panels, PANELS, strict=True):
        for server, (label, colour, marker) in SERVERS.items():
            of_rate = [runs[f"{shape}@{rate:g}"].get(server, []) for rate in rates]
            if not all(of_rate):
                continue
            values = [[run[name] for run in each] for each in of_rate]
            middle = [statistics.median(each) for each in values]
            spread = [
                [at - min(each) for at, each in zip(middle, values, strict=True)],
                [max(each) - at for at, each in zip(middle, values, strict=True)],
            ]
            panel.errorbar(rates, middle, spread, label=label, color=colour, marker=marker, markersize=5, capsize=3)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("requests per second")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(SERVERS), frameon=False)
    figure.savefig(image, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("image", type=Path)
    parser.add_argument("--shape", default="256/64", help="prompt/output tokens of the cases (default 256/64)")
    options = parser.parse_args()
    report = msgspec.json.decode(options.result.read_bytes(), type=Report)
    draw(report.figures["runs"], options.shape, options.image)
    print(f"wrote {options.image}")


if __name__ == "__main__":
    main()
