"""How far the workers are with loading their weights, for the bar that `tandem up` shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def fraction_loaded(files: Sequence[Path]) -> float | None:
    """The mean of what the workers have written (`engine.loading.progress`); None before any has."""
    told = [_read(file) for file in files]
    return sum(told) / len(told) if any(told) else None


def _read(file: Path) -> float:
    try:
        return float(file.read_text())
    except (OSError, ValueError):  # not there yet, or just being written
        return 0.0
