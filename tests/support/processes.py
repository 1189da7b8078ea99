"""CPU time, memory and children of processes, read from /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from tandem.deploy.processes.runtime_dir import runtime_dir

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessMemory(msgspec.Struct, frozen=True):
    """Memory of one process in MiB.

    `own_mib` is anonymous memory, where a leak shows. `pss_mib` also counts a share of shared memory; it grows while
    the blocks of a KV pool are used for the first time.
    """

    own_mib: float
    pss_mib: float


def cluster_memory(port: int) -> dict[str, ProcessMemory]:
    """Returns the memory of the launcher and its children, by process name."""
    pids = {path.stem: int(path.read_text()) for path in runtime_dir(port).glob("*.pid")}
    return {name: process_memory(pid) for name, pid in sorted(pids.items())}


def process_memory(pid: int) -> ProcessMemory:
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0])  # KiB
    return ProcessMemory(round(fields["Anonymous"] / 1024, 1), round(fields["Pss"] / 1024, 1))


def num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def family_cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process and all its living descendants, user and system time."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
            ticks[int(stat.parent.name)] = int(fields[11]) + int(fields[12])
    family = {pid}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(ticks[member] for member in family) / _TICKS_PER_S


def descendants(pid: int) -> list[int]:
    """Returns all descendants. A child belongs to the thread that started it, so all threads are searched."""
    try:
        tasks = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    found: list[int] = []
    for task in tasks:
        try:
            children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            found += [child, *descendants(child)]
    return found


def private_bytes(pid: int) -> int:
    """Returns the memory of a process that it shares with no other; 0 of one that has ended."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    except (OSError, ValueError):  # it has ended
        return 0
    return 4096 * (resident - shared)
