"""Identifies the host of a process. Processes of one host can share memory."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def host_id() -> str:
    """Returns an id that two processes share if they have the same kernel boot and PID namespace.

    Such processes can open each other's descriptors under /proc.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def is_elsewhere(other: str) -> bool:
    """Returns whether `other` is the host_id of another host. An empty id counts as this host."""
    return other not in ("", host_id())
