"""Progress of loading the weights, for the bar that `tandem up` shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def fraction_loaded(files: Sequence[Path]) -> float | None:
    """Mean fraction that the workers have written (`engine.loading.progress`); None before the first has."""
    fractions = [_read(file) for file in files]
    return sum(fractions) / len(fractions) if any(fractions) else None


def _read(file: Path) -> float:
    try:
        return float(file.read_text())
    except (OSError, ValueError):  # it does not exist yet or is being written
        return 0.0
