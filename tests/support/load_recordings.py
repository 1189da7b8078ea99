"""Recorded load reports of a real cluster, one JSON line per second, in tests/recordings."""

from __future__ import annotations

import lzma
from pathlib import Path

import msgspec

from tandem.engine.steps.step_times import StepTimes
from tandem.protocol.messages.membership import WorkerInfo, WorkerLoad


class Observed(msgspec.Struct, frozen=True):
    """Load reports of all workers, `at` seconds after the recording started."""

    at: float
    workers: list[tuple[WorkerInfo, WorkerLoad]]


def read_recording(file: Path) -> list[Observed]:
    """Reads an xz-compressed recording, and adds the step times that its workers measured but did not report."""
    times: dict[str, StepTimes] = {}
    found = []
    for line in lzma.decompress(file.read_bytes()).splitlines():
        observed = msgspec.json.decode(line, type=Observed)
        found.append(Observed(observed.at, [(info, _fitted(times, info, load)) for info, load in observed.workers]))
    return found


def _fitted(times: dict[str, StepTimes], info: WorkerInfo, load: WorkerLoad) -> WorkerLoad:
    if info.role != "decode":
        return load
    fit = times.setdefault(info.epoch, StepTimes())
    fit.on_step(load.num_running, 0, load.step_time_s)
    return msgspec.structs.replace(load, fixed_step_s=fit.fixed_s, step_s_per_sequence=fit.s_per_sequence)
