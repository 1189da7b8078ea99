"""What the processes of a cluster have of the machine's memory, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tandem.deploy.processes.runtime_dir import runtime_dir


class ProcessMemory(msgspec.Struct, frozen=True):
    """In MiB. own: anonymous memory, in which a leak would show. pss: all of it, what is shared counted in part; KV
    pools grow into theirs as their blocks are first used.
    """

    own_mib: float
    pss_mib: float


def cluster_memory(port: int) -> dict[str, ProcessMemory]:
    """Of the launcher and of its children, by name."""
    pids = {path.stem: int(path.read_text()) for path in runtime_dir(port).glob("*.pid")}
    return {name: process_memory(pid) for name, pid in sorted(pids.items())}


def process_memory(pid: int) -> ProcessMemory:
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0])  # KiB
    return ProcessMemory(round(fields["Anonymous"] / 1024, 1), round(fields["Pss"] / 1024, 1))
