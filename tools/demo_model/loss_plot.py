"""Plots the loss over the steps of the training."""

from __future__ import annotations

from pathlib import Path

from tandem.runtime.errors import ConfigError

_SMOOTHED_OVER = 50  # steps


def check_plotting() -> None:
    """Raises ConfigError without matplotlib, so that a training does not fail at its end."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("the loss plot needs matplotlib: pip install matplotlib") from error


def plot_losses(losses: list[float], file: Path) -> None:
    """Plots the loss of each step in grey and its running mean. `file`: .svg or .png."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tandem"  # makes the file reproducible
    import matplotlib.pyplot as plt

    smooth = [_mean(losses[max(0, i - _SMOOTHED_OVER) : i + _SMOOTHED_OVER]) for i in range(len(losses))]
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.plot(losses, color="0.8", linewidth=0.5)
    axes.plot(smooth, color="tab:blue")
    axes.set(yscale="log", xlabel="step", ylabel="loss per answered token", title="Training of the demo model")
    axes.grid(which="both", alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
