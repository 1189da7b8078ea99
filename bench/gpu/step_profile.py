"""What the device and the host do in a step: kernels, copies, launches, waits, and the gap before the next step.

Read from torch's profiler (CUPTI). Without a GPU there are no device events, and all counts are 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

STEP = "tandem step"
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cuGraphLaunch")
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize")

_NUM_HEAVIEST, _MAX_NAME = 12, 100


@dataclass(frozen=True)
class TracedEvent:
    """on_device: a kernel, copy or fill; otherwise a call of the host. Times in microseconds, of one clock."""

    name: str
    on_device: bool
    start: float
    end: float


@dataclass(frozen=True)
class StepProfile:
    """Means over steps. device_ms: from the first device event of a step to the end of its last. busy_ms: of it, with
    at least one running. host_gap_ms: from a step's last device event to the next step's first. heaviest: the kernels
    that take most of the device's time, as microseconds and launches of a step, by name."""

    num_kernels: float
    num_copies: float
    num_launches: float
    num_waits: float
    device_ms: float
    busy_ms: float
    host_gap_ms: float
    heaviest: dict[str, tuple[float, float]]


def summarise(events: Iterable[TracedEvent]) -> StepProfile:
    """Divides the events into steps: each begins with an event named STEP of the host, and is over when that ends."""
    found = sorted(events, key=lambda event: event.start)
    ranges = [event for event in found if event.name == STEP and not event.on_device]
    if not ranges:
        raise ValueError("the profiler has recorded no step")
    steps = [[e for e in found if e is not r and r.start <= e.start <= r.end and e.name != STEP] for r in ranges]
    on_device = [[e for e in step if e.on_device] for step in steps]
    on_host = [e for step in steps for e in step if not e.on_device]
    num_copies = sum(e.name.startswith("Memcpy") for step in on_device for e in step)
    num_fills = sum(e.name.startswith("Memset") for step in on_device for e in step)
    spans = [(step[0].start, max(e.end for e in step)) for step in on_device if step]
    gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(spans)]
    num = len(ranges)
    return StepProfile(
        num_kernels=(sum(map(len, on_device)) - num_copies - num_fills) / num,
        num_copies=num_copies / num,
        num_launches=sum(e.name.startswith(_LAUNCHES) for e in on_host) / num,
        num_waits=sum(e.name.startswith(_WAITS) for e in on_host) / num,
        device_ms=sum(end - start for start, end in spans) / num / 1e3,
        busy_ms=sum(map(_busy, on_device)) / num / 1e3,
        host_gap_ms=sum(gaps) / max(1, len(gaps)) / 1e3,
        heaviest=_heaviest([e for step in on_device for e in step], num),
    )


def _heaviest(events: Sequence[TracedEvent], num_steps: int) -> dict[str, tuple[float, float]]:
    totals: dict[str, tuple[float, float]] = {}
    for event in events:
        name = event.name[:_MAX_NAME]
        time, num = totals.get(name, (0.0, 0))
        totals[name] = time + (event.end - event.start) / num_steps, num + 1 / num_steps
    first = sorted(totals.items(), key=lambda item: -item[1][0])[:_NUM_HEAVIEST]
    return {name: (round(time, 1), round(num, 2)) for name, (time, num) in first}


def _busy(events: Sequence[TracedEvent]) -> float:
    """Returns the time in which at least one event runs. events: by start."""
    total, end = 0.0, float("-inf")
    for event in events:
        total += max(0.0, event.end - max(event.start, end))
        end = max(end, event.end)
    return total


def profile_steps(run: Callable[[], Any], num_steps: int = 5) -> StepProfile:
    """Profiles calls of `run`, each of which ends when the device is done."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        for _ in range(num_steps):
            with record_function(STEP):
                run()
    events = []
    for event in recorded.events() or []:
        on_device = event.device_type.name != "CPU"
        if on_device and event.name == STEP:
            continue  # the same range, as the device saw it
        events.append(TracedEvent(event.name, on_device, event.time_range.start, event.time_range.end))
    return summarise(events)
