"""What a cluster holds of its machine, before a fault and after it: descriptors, shared memory, files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tandem.deploy.processes.runtime_dir import runtime_dir
from tests.faults.streams import descendants, open_files
from tests.support.cluster import Cluster

_SHM = Path("/dev/shm")


@dataclass
class Footprint:
    """open_files: by process, what its descriptors lead to, by kind. threads: by process, by name, those that have one
    of their own: KV paths' for one, but none of a pool that grows with its work. shared_memory, files: names.

    Files of a proxy's metrics are none of these: what a proxy has counted counts for as long as the cluster runs.
    """

    open_files: dict[int, Counter[str]]
    threads: dict[int, Counter[str]]
    shared_memory: set[str]
    files: set[str]

    @classmethod
    def of(cls, cluster: Cluster, shared_before: set[str]) -> Footprint:
        """shared_before: what others had in shared memory before the cluster came up."""
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
        """In words, of processes that live on. Empty when nothing was."""
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
    return {path.name for path in _SHM.iterdir()}


def _named_threads(pid: int) -> Counter[str] | None:
    """Those that go by another name than the process. None when it has ended."""
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
    """socket:[123] is a socket; a file that has been removed is its name."""
    name, bracket, _ = file.partition(":[")
    return name if bracket else file.removesuffix(" (deleted)")


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return "ended"
    return " ".join(word.rpartition("/")[2] for word in words[1:4] if word)
