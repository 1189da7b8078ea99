"""Reads this host's CPU times and where workers have their memory, from /proc and /sys."""

from __future__ import annotations

import http.client
import ipaddress
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple

from tandem.deploy.diagnosis.observation import HostFigures, ProcessUse, WorkerMemory
from tandem.protocol.messages.membership import WorkerInfo
from tandem.runtime.host import is_elsewhere

TICKS_PER_S = 100
"""Of the times in /proc; fixed in Linux's interface to programs (USER_HZ)."""
_SMALL_PAGE_KB = 4


class ProcessTimes(NamedTuple):
    """One process. ticks: of CPU time since its start."""

    name: str
    parent: int
    ticks: int


@dataclass(frozen=True)
class HostReading:
    """CPU times since the start of the host and of each process, in ticks."""

    num_cpus: int
    busy: int
    stolen: int
    processes: Mapping[int, ProcessTimes]


def read_host(proc: Path = Path("/proc")) -> HostReading:
    """Reads the times of all processes that can be seen. Raises OSError without a /proc like Linux's."""
    lines = (proc / "stat").read_text().splitlines()
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(word) for word in lines[0].split()[1:9])
    processes = {}
    for folder in proc.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended
                processes[int(folder.name)] = _process_times((folder / "stat").read_text())
    num_cpus = sum(re.match(r"cpu\d", line) is not None for line in lines)
    return HostReading(num_cpus, user + nice + system + irq + softirq + steal, steal, processes)


def _process_times(stat: str) -> ProcessTimes:
    before, _, after = stat.rpartition(")")  # the name may have spaces and parentheses
    fields = after.split()
    return ProcessTimes(before.partition("(")[2], int(fields[1]), int(fields[11]) + int(fields[12]))


def host_figures(
    before: HostReading,
    after: HostReading,
    seconds: float,
    own: frozenset[int],
    memory: Mapping[str, WorkerMemory],
    num_nodes: int,
    cpu_quota: float = math.inf,
) -> HostFigures:
    """own: processes of the cluster; their descendants belong to it too. seconds: between the readings."""
    unit = 1 / (TICKS_PER_S * max(seconds, 0.01))
    used = {
        pid: unit * (times.ticks - (before.processes[pid].ticks if pid in before.processes else 0))
        for pid, times in after.processes.items()
    }
    of_cluster = {pid for pid in after.processes if _belongs(pid, own, after.processes)}
    neighbours = [
        ProcessUse(pid, after.processes[pid].name, cpus) for pid, cpus in used.items() if pid not in of_cluster
    ]
    return HostFigures(
        num_cpus=after.num_cpus,
        busy_cpus=unit * (after.busy - before.busy),
        own_cpus=sum(used[pid] for pid in of_cluster),
        stolen_cpus=unit * (after.stolen - before.stolen),
        neighbours=tuple(sorted(neighbours, key=lambda each: -each.num_cpus)),
        cpu_quota=cpu_quota,
        num_nodes=num_nodes,
        memory=memory,
    )


def _belongs(pid: int, own: frozenset[int], processes: Mapping[int, ProcessTimes]) -> bool:
    while pid in processes:
        if pid in own:
            return True
        pid = processes[pid].parent
    return False


def node_cpus(sys: Path = Path("/sys")) -> dict[int, set[int]]:
    """Returns the CPUs of each NUMA node; nothing where the kernel does not say."""
    found = {}
    for folder in (sys / "devices/system/node").glob("node[0-9]*"):
        with suppress(OSError):
            found[int(folder.name[4:])] = _numbers((folder / "cpulist").read_text())
    return found


def worker_memory(pid: int, cpus: Mapping[int, set[int]], proc: Path = Path("/proc")) -> WorkerMemory | None:
    """Returns where a process may run and where its pages are. None if it has ended or belongs to another user.

    cpus: of each node.
    """
    try:
        status = (proc / str(pid) / "status").read_text()
        maps = (proc / str(pid) / "numa_maps").read_text()
    except OSError:
        return None
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
    may_use = _numbers(allowed[1]) if allowed else set()
    pages: dict[int, int] = {}
    for line in maps.splitlines():
        size = re.search(r"kernelpagesize_kB=(\d+)", line)
        for node, count in re.findall(r" N(\d+)=(\d+)", line):
            scale = int(size[1]) // _SMALL_PAGE_KB if size else 1
            pages[int(node)] = pages.get(int(node), 0) + int(count) * max(1, scale)
    return WorkerMemory(frozenset(node for node, numbers in cpus.items() if numbers & may_use), pages)


def _numbers(text: str) -> set[int]:
    """Parses a list such as 0-3,8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


_TIMEOUT_S = 2.0
_THREADS = 16
_RESOLUTION_S = 1.0
"""HTTP dates are cut to whole seconds."""


def clock_offsets(workers: Iterable[WorkerInfo]) -> dict[str, float]:
    """Returns the wall clock of each worker on another host minus this host's, where it can be reached.

    Workers that serve /metrics on a loopback address cannot be. Takes at most a few seconds.
    """
    asked = [
        worker
        for worker in workers
        if is_elsewhere(worker.host_id) and worker.metrics_address and not _is_loopback(worker.metrics_address)
    ]
    if not asked:
        return {}
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda worker: clock_offset(worker.metrics_address), asked)
        return {
            worker.worker_id: offset_s for worker, offset_s in zip(asked, found, strict=True) if offset_s is not None
        }


def clock_offset(address: str, clock: Callable[[], float] = time.time) -> float | None:
    """Returns by how many seconds the clock there is ahead; None without an answer. address: host:port of /metrics."""
    sent_at = clock()
    try:
        connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            date = answer.getheader("Date", "")
            answer.read()
        finally:
            connection.close()
        told = parsedate_to_datetime(date).timestamp()
    except (OSError, http.client.HTTPException, ValueError):
        return None
    return offset_of(told, sent_at, clock())


def offset_of(told: float, sent_at: float, received_at: float) -> float:
    """Returns the offset that the date shows for certain: 0 if both clocks may agree."""
    if told > received_at:
        return told - received_at
    latest = told + _RESOLUTION_S
    return min(0.0, latest - sent_at)


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
