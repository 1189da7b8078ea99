"""How many CPU cores this process may use. Everything that chooses a number of threads or processes asks here.

A process may use the cores of its affinity, for the share of time that the CPU quotas of its control group and of all
groups above it leave: `docker run --cpus`, a pod's limit and systemd's CPUQuota set such a quota, and `os.cpu_count`
knows nothing of it. Threads beyond the quota use it up early in each period and then all wait for the next one.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_ESCAPED = re.compile(r"\\([0-7]{3})")
"""A blank, tab, line break or backslash in a path of mountinfo."""


class _Mount(NamedTuple):
    """A mounted hierarchy of control groups."""

    version: int
    root: PurePosixPath
    """The group that is seen at the mount point: not the host's topmost one in many containers."""
    point: Path


def num_cores(proc: Path = Path("/proc/self"), files: Path = Path("/")) -> int:
    """Returns the number of cores that this process may use, at least 1. A part of a core counts as one.

    proc: folder of the process in /proc. files: root folder of the mount points.
    """
    available = len(os.sched_getaffinity(0))  # noqa: TID251  # the only call
    return max(1, math.ceil(min(available, cpu_quota(proc, files))))


def cpu_quota(proc: Path = Path("/proc/self"), files: Path = Path("/")) -> float:
    """Returns the lowest CPU quota, in cores, of the process's control group and the groups above it; inf for none."""
    try:
        groups = (proc / "cgroup").read_text().splitlines()
        mounts = list(_mounts((proc / "mountinfo").read_text()))
    except (OSError, UnicodeDecodeError):
        return math.inf
    quotas = []
    for line in groups:
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        version = 2 if number == "0" and not controllers else 1
        if version == 2 or "cpu" in controllers.split(","):
            for mount in mounts:
                if mount.version == version:
                    quotas += [_quota(folder, version) for folder in _folders(mount, group, files)]
    return min(quotas, default=math.inf)


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    """Yields the hierarchies that may have CPU quotas. The format is described in proc_pid_mountinfo(5)."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        if kind[0] == "cgroup2" or "cpu" in kind[2].split(","):
            root, point = map(_unescaped, fields[3:5])
            if not point.startswith("/"):
                continue  # the kernel writes none
            yield _Mount(2 if kind[0] == "cgroup2" else 1, PurePosixPath(root), Path(point))


def _unescaped(path: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), path)


def _folders(mount: _Mount, group: str, files: Path) -> Iterator[Path]:
    """Yields the folders of the group and of those above it, as far as they can be seen."""
    try:
        below = PurePosixPath(group).relative_to(mount.root)
    except ValueError:  # the group is not below the mount: what is mounted is all that limits us visibly
        below = PurePosixPath()
    top = files / mount.point.relative_to("/")
    if ".." in below.parts:  # a group outside of this process's namespace
        below = PurePosixPath()
    for part in (below, *below.parents):
        yield top / part


def _quota(folder: Path, version: int) -> float:
    """Returns the quota of one group, in cores; inf if it has none or if the kernel's files cannot be read."""
    try:
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        cores = int(quota) / int(period) if quota != "max" else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
    return cores if cores > 0 else math.inf
