"""What the processes of a server spend: CPU time, memory and descriptors of each kind, sampled from /proc.

CPU time is what to judge by on a machine that others use: a request that makes a process work for seconds does so
whether or not anybody waits for it meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.deploy.processes.runtime_dir import runtime_dir
from tests.support.processes import num_descriptors

SAMPLE_S = 0.2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LOOP = "proxy loop"
"""The first thread of a proxy, whose event loop all clients share."""


@dataclass
class Costs:
    """Of the time between two marks, by kind of process."""

    elapsed_s: float = 0.0
    cpu_s: Counter[str] = field(default_factory=Counter)
    wanted_s: Counter[str] = field(default_factory=Counter)
    """CPU time, and the time for which threads that could run waited for a processor: who works, on a busy machine."""
    grown_bytes: Counter[str] = field(default_factory=Counter)
    """Of the largest process of each kind, from the first mark to its peak."""
    num_descriptors: Counter[str] = field(default_factory=Counter)
    """The most of one process."""
    ended: list[str] = field(default_factory=list)
    """Kinds of processes that others notice when they end."""

    def add(self, later: Costs) -> None:
        """Makes these the costs of both times."""
        self.elapsed_s += later.elapsed_s
        self.cpu_s += later.cpu_s
        self.wanted_s += later.wanted_s
        self.grown_bytes += later.grown_bytes
        self.num_descriptors |= later.num_descriptors  # the larger of each
        self.ended += later.ended


class CostAccount:
    """A context manager that samples all processes below a launcher. `take` returns the costs since the last call."""

    def __init__(self, launcher_pid: int, port: int) -> None:
        self._launcher_pid = launcher_pid
        self._port = port
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._cpu_s: dict[tuple[int, str], float] = {}
        self._wanted_s: dict[tuple[int, str], float] = {}
        self._first_bytes: dict[int, int] = {}
        self._named: dict[int, str] = {}
        self._costs, self._since = Costs(), time.monotonic()

    def __enter__(self) -> CostAccount:
        self._sample()
        self.take()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def take(self) -> Costs:
        self._sample()
        with self._lock:
            costs, now = self._costs, time.monotonic()
            costs.elapsed_s = now - self._since
            self._costs, self._since = Costs(), now
            self._first_bytes.clear()
        return costs

    def _run(self) -> None:
        while not self._stopped.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        with self._lock:
            named = dict(self._processes())
            for pid, kind in named.items():
                with suppress(OSError, ValueError, IndexError):  # it has ended
                    self._count(pid, kind)
            main = {path.stem: pid for pid, path in self._main_pids().items()}
            self._costs.ended += [
                kind for pid, kind in self._named.items() if pid not in named and kind in main and "/" not in kind
            ]
            self._named = named

    def _main_pids(self) -> dict[int, Path]:
        found = {}
        for path in runtime_dir(self._port).glob("*.pid"):
            with suppress(OSError, ValueError):
                found[int(path.read_text())] = path
        return found

    def _processes(self) -> list[tuple[int, str]]:
        """Returns the processes that the launcher has started, and their children, which are named after them."""
        main = self._main_pids()
        found, waiting = [], [(self._launcher_pid, "launcher")]
        while waiting:
            pid, kind = waiting.pop()
            found.append((pid, kind))
            with suppress(OSError):
                for child in (child for task in Path(f"/proc/{pid}/task").iterdir() for child in _children(task)):
                    name = main[child].stem if child in main else kind if kind.endswith("/child") else f"{kind}/child"
                    waiting.append((child, name))
        return found

    def _count(self, pid: int, kind: str) -> None:
        self._spend(pid, kind, cpu_s(Path(f"/proc/{pid}/stat")))
        self._spend(pid, kind, wanted_s(pid), is_wanted=True)
        if kind.startswith("proxy") and "/" not in kind:
            self._spend(pid, LOOP, cpu_s(Path(f"/proc/{pid}/task/{pid}/stat")))
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        own = 4096 * (resident - shared)
        first = self._first_bytes.setdefault(pid, own)
        costs = self._costs
        costs.grown_bytes[kind] = max(costs.grown_bytes[kind], own - first)
        costs.num_descriptors[kind] = max(costs.num_descriptors[kind], num_descriptors(pid))

    def _spend(self, pid: int, kind: str, spent_s: float, is_wanted: bool = False) -> None:
        counted: Any = self._costs.wanted_s if is_wanted else self._costs.cpu_s  # Counter is declared for int only
        known = self._wanted_s if is_wanted else self._cpu_s
        counted[kind] += max(0.0, spent_s - known.get((pid, kind), 0.0))
        known[pid, kind] = spent_s


def cpu_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def wanted_s(pid: int) -> float:
    """Returns for how long the threads of a process ran or waited for a processor."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError, ValueError):  # it has ended, or the kernel does not tell
            ran_ns, waited_ns, _ = map(int, (task / "schedstat").read_text().split())
            total_ns += ran_ns + waited_ns
    return total_ns / 1e9


def _children(task: Path) -> list[int]:
    return [int(child) for child in (task / "children").read_text().split()]
