"""Snapshot of a cluster's resources (descriptors, threads, shared memory, files), to find leaks after a fault."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tandem.deploy.processes.runtime_dir import runtime_dir
from tests.faults.streams import open_files
from tests.support.cluster import Cluster
from tests.support.processes import descendants

_SHM = Path("/dev/shm")


@dataclass
class Footprint:
    """open_files: by process, targets of its descriptors by kind. threads: by process, its named threads, such as those
    of KV paths; pool threads have no name of their own. shared_memory, files: names.

    Metrics files of proxies are excluded: they are kept until the cluster ends.
    """

    open_files: dict[int, Counter[str]]
    threads: dict[int, Counter[str]]
    shared_memory: set[str]
    files: set[str]

    @classmethod
    def of(cls, cluster: Cluster, shared_before: set[str]) -> Footprint:
        """shared_before: contents of /dev/shm before the cluster was started."""
        folder = runtime_dir(cluster.port)
        launcher = int((folder / "launcher.pid").read_text())
        pids = [launcher, *descendants(launcher)]
        return cls(
            {pid: Counter(map(_kind, files)) for pid in pids if (files := open_files(pid))},
            {pid: names for pid in pids if (names := _named_threads(pid)) is not None},
            shared_memory() - shared_before,
            {str(path.relative_to(folder)) for path in folder.rglob("*") if path.parent.name != "metrics"},
        )

    def leaked_since(self, before: Footprint) -> list[str]:
        """Returns descriptions of leaks, considering only processes that are still alive."""
        leaks = []
        for pid in sorted(self.open_files.keys() & before.open_files.keys()):
            for kind, count in sorted((self.open_files[pid] - before.open_files[pid]).items()):
                leaks.append(f"process {pid} ({_command(pid)}) has {count} more of {kind}")
        for pid in sorted(self.threads.keys() & before.threads.keys()):
            for name, count in sorted((self.threads[pid] - before.threads[pid]).items()):
                leaks.append(f"process {pid} ({_command(pid)}) has {count} more threads {name}")
        leaks += [f"/dev/shm/{name}" for name in sorted(self.shared_memory - before.shared_memory)]
        leaks += [f"file {name}" for name in sorted(self.files - before.files)]
        return leaks


def shared_memory() -> set[str]:
    """Returns the files of shared memory that no process has mapped: those of running programs are not leaked."""
    names = {path.name for path in _SHM.iterdir()}
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        try:
            names -= {line.rpartition("/dev/shm/")[2] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
        except OSError:  # it has ended meanwhile
            continue
    return names


def _named_threads(pid: int) -> Counter[str] | None:
    """Returns threads that have another name than the process. None if the process has ended."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        own = (tasks / str(pid) / "comm").read_text().strip()
        threads = list(tasks.iterdir())
    except OSError:
        return None
    names = []
    for thread in threads:
        try:
            names.append((thread / "comm").read_text().strip())
        except OSError:  # it has ended meanwhile
            continue
    return Counter(name for name in names if name != own)


def _kind(file: str) -> str:
    """Maps socket:[123] to socket; removes the mark of deleted files."""
    name, bracket, _ = file.partition(":[")
    return name if bracket else file.removesuffix(" (deleted)")


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return "ended"
    return " ".join(word.rpartition("/")[2] for word in words[1:4] if word)
