"""Recorded load reports of a real cluster, one JSON line per second, in tests/recordings."""

from __future__ import annotations

import lzma
from pathlib import Path

import msgspec

from tandem.protocol.messages.membership import WorkerInfo, WorkerLoad


class Observed(msgspec.Struct, frozen=True):
    """Load reports of all workers, `at` seconds after the recording started."""

    at: float
    workers: list[tuple[WorkerInfo, WorkerLoad]]


def read_recording(file: Path) -> list[Observed]:
    """Reads an xz-compressed recording."""
    return [msgspec.json.decode(line, type=Observed) for line in lzma.decompress(file.read_bytes()).splitlines()]
