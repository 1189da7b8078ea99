"""Gives processes a fixed share of a core, by Linux' CPU bandwidth control: many small machines out of a few cores.

Needs root, or a writable cgroup, of version 1 or 2. docs: kernel.org, "CFS Bandwidth Control".
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

PERIOD_US = 5000
"""Short, so that a process which has used its share up stands still for milliseconds only."""
_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
_REMOVED_WITHIN_S = 5.0


class NoCoreShares(Exception):
    """This system does not let us; says why."""


@contextmanager
def core_shares(cores: dict[int, float]) -> Iterator[None]:
    """While it is open each process (by pid, with all its threads) gets so many cores at most.

    Raises NoCoreShares. The processes are to have ended, or go back to where they were, when it closes.
    """
    root = next((root for root in _ROOTS if _is_ours(root)), None)
    if root is None:
        raise NoCoreShares("no cgroup of the cpu controller can be made here (it takes root on Linux)")
    folders = []
    try:
        for pid, share in cores.items():
            folder = root / f"tandem-{os.getpid()}-{pid}"
            folder.mkdir()
            folders.append(folder)
            quota_us = int(share * PERIOD_US)
            if (folder / "cpu.max").exists():
                (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
            (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for folder in folders:
            _remove(root, folder)


def same_shares(pids: Iterable[int], share: float) -> AbstractContextManager[None]:
    """As `core_shares`, the same for each; 0 sets no limit."""
    return core_shares(dict.fromkeys(pids, share)) if share else nullcontext()


def _is_ours(root: Path) -> bool:
    probe = root / f"tandem-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    found = (probe / "cpu.max").exists() or (probe / "cpu.cfs_quota_us").exists()
    probe.rmdir()
    return found


def _remove(root: Path, folder: Path) -> None:
    """What still runs goes back. A process that has just ended may hold its group for a moment."""
    deadline = time.monotonic() + _REMOVED_WITHIN_S
    while True:
        for pid in (folder / "cgroup.procs").read_text().split():
            try:
                (root / "cgroup.procs").write_text(pid)
            except ProcessLookupError:
                continue
        try:
            folder.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
