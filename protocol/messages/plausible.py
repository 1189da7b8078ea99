"""Makes figures plausible that inform and decide nothing irrevocable: loads, speeds, durations, counts. Pure.

Such a figure must not silence its sender: a worker whose report has one bad figure still serves. The receiver does
without the figure. Values that would corrupt something are refused instead, see `protocol.messages.checks`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.protocol.messages.checks import MAX_PAIRS, MAX_TIERS
from tandem.protocol.messages.membership import PrefixUpdate, WorkerLoad, WorkerStatus

MAX_FIGURE = 1e15
"""Seconds, or tokens per second, above which a figure is wrong."""
MIN_FIGURE = 1e-9
"""Seconds, or tokens per second, below which a figure is the rounding error of a zero."""
MAX_COUNT = 2**63 - 1
MAX_PRIORITIES = 4096
"""Entries of `WorkerLoad.waiting_tokens`."""

_MAX_ENTRIES = {
    "waiting_tokens": MAX_PRIORITIES,
    "tiers": MAX_TIERS,
    "traffic": MAX_PAIRS,
}


def plausible_figure(value: float) -> float:
    """Returns the figure if it can be true, else 0. NaN, infinite, negative and huge values cannot."""
    return value if MIN_FIGURE <= value <= MAX_FIGURE else 0.0


def plausible_count(value: int, most: int = MAX_COUNT) -> int:
    """Returns the nearest count from 0 to `most`."""
    return min(max(value, 0), most)


def plausible_status(message: WorkerStatus, last_load: WorkerLoad) -> tuple[WorkerStatus, list[str]]:
    """Replaces figures that cannot be true by those of the worker's last report. Returns also the names of what was
    replaced.

    Too many pairs and truncated prefix updates are left out; the gap in the numbers makes the proxy ask for all.
    """
    dropped: list[str] = []
    load: dict[str, Any] = {}
    for field, value in zip(WorkerLoad.__struct_fields__, msgspec.structs.astuple(message.load), strict=True):
        if type(value) is int and 0 <= value <= MAX_COUNT:  # most of them
            continue
        if isinstance(value, float) and -MIN_FIGURE < value < MIN_FIGURE:
            if value:
                load[field] = 0.0
        elif not _is_plausible(value) or (isinstance(value, list) and len(value) > _MAX_ENTRIES[field]):
            load[field] = getattr(last_load, field)
            dropped.append(f"load.{field}")
    changes: dict[str, Any] = {"load": msgspec.structs.replace(message.load, **load)} if load else {}
    if (pairs := message.pairs) is not None and max(len(pairs.changed), len(pairs.gone)) > MAX_PAIRS:
        changes["pairs"] = None
        dropped.append("pairs")
    for field in ("prefixes", "tier_prefixes"):
        update: PrefixUpdate | None = getattr(message, field)
        if update is not None and (len(update.added) % 8 or len(update.evicted) % 8):
            changes[field] = None
            dropped.append(field)
    return msgspec.structs.replace(message, **changes) if changes else message, dropped


def _is_plausible(value: Any) -> bool:
    """Whether a figure, or each in a list of named figures, can be true."""
    if isinstance(value, int):
        return 0 <= value <= MAX_COUNT
    if isinstance(value, float):
        return value == 0 or MIN_FIGURE <= value <= MAX_FIGURE
    if isinstance(value, str):
        return True
    if isinstance(value, list):
        return all(map(_is_plausible_entry, value))
    raise TypeError(f"a figure of type {type(value).__name__}")


def _is_plausible_entry(entry: Any) -> bool:
    if isinstance(entry, tuple):
        label, number = entry  # the label of waiting tokens is a priority, which may be negative
        return (isinstance(label, str) or abs(label) < 2**31) and _is_plausible(number)
    return all(map(_is_plausible, msgspec.structs.astuple(entry)))
