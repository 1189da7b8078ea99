"""CPU time of processes, user's and system's, as /proc tells it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Of a process, all its threads."""
    return user_s(pid) + system_s(pid)


def user_s(pid: int) -> float:
    return _time_s(pid, 11)


def system_s(pid: int) -> float:
    return _time_s(pid, 12)


def family_cpu_s(pid: int) -> float:
    """Of a process and all that descend from it and live; they may have sessions of their own."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = _fields(stat)
            parents[int(stat.parent.name)] = int(fields[1])
            ticks[int(stat.parent.name)] = int(fields[11]) + int(fields[12])
    family = {pid}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(ticks[member] for member in family) / _TICKS_PER_S


def cpu_s_by_module(pids: list[int]) -> dict[str, float]:
    """Of processes that run as `python -m MODULE`, each with its children; by module."""
    told: dict[str, float] = {}
    for pid in pids:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        module = command[command.index("-m") + 1].removeprefix("tandem.")
        told[module] = told.get(module, 0.0) + family_cpu_s(pid)
    return told


def children(pid: int) -> list[int]:
    """Processes that this one's main thread started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _time_s(pid: int, field: int) -> float:
    return int(_fields(Path(f"/proc/{pid}/stat"))[field]) / _TICKS_PER_S


def _fields(stat: Path) -> list[str]:
    """Those behind the command's name."""
    return stat.read_text().rpartition(")")[2].split()
