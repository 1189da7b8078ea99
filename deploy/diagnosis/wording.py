"""Figures as people read them, for the sentences of a diagnosis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One thing that a diagnosis says."""

    kind: str
    """Short name, the same for all findings of one kind."""
    text: str
    """Sentences with the figures on which the finding rests."""


def time_text(seconds: float) -> str:
    """Returns a time with two or three digits and a unit."""
    if math.isinf(seconds):
        return "for ever"
    if seconds >= 1:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    milliseconds = 1000 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 or milliseconds < 0.05 else f"{milliseconds:.1f} ms"


def count_text(number: float, singular: str, plural: str = "") -> str:
    return f"{number:,.0f} {singular if round(number) == 1 else plural or singular + 's'}"


def rate_text(per_s: float, unit: str) -> str:
    return f"{per_s:,.0f} {unit}/s" if per_s >= 10 else f"{per_s:.1f} {unit}/s"


def speed_text(bytes_per_s: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.1f} {unit}/s"
    return f"{bytes_per_s / 1e3:.1f} kB/s"


def names_text(names: Sequence[str]) -> str:
    """Returns names as a list in a sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
