"""Simulated hosts (network namespaces) with packet delay, loss and cuts between them. See `faulty_switch`."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec

from tests.support.faulty_switch import Fault, FaultReport, address


def unavailable_reason() -> str:
    """Why this machine cannot create network namespaces; "" when it can."""
    missing = [program for program in ("ip", "nsenter", "unshare") if shutil.which(program) is None]
    if missing:
        return f"there is no {missing[0]} (packages iproute2 and util-linux)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened"
    probe = subprocess.run(
        ["unshare", "--net", "ip", "tuntap", "add", "mode", "tun", "name", "probe"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"network namespaces are not allowed here ({probe.stderr.strip()})" if probe.returncode else ""


class FaultyNetwork:
    """Context manager around the hosts 0 to `num_hosts` - 1. Faults last until `set_faults` replaces them."""

    def __init__(self, num_hosts: int) -> None:
        self._num_hosts = num_hosts
        self._namespaces: list[Path] = []

    def __enter__(self) -> Self:
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "tests.support.faulty_switch", str(self._num_hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._switch.stdout is not None
        descriptors = msgspec.json.decode(self._switch.stdout.readline(), type=list[int])
        self._namespaces = [Path(f"/proc/{self._switch.pid}/fd/{descriptor}") for descriptor in descriptors]
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._switch.kill()
        self._switch.communicate()

    def set_faults(self, *faults: Fault) -> int:
        """Replaces the faults; returns how many packets the previous ones dropped."""
        assert self._switch.stdin is not None and self._switch.stdout is not None
        self._switch.stdin.write(msgspec.json.encode(list(faults)) + b"\n")
        self._switch.stdin.flush()
        return msgspec.json.decode(self._switch.stdout.readline(), type=FaultReport).num_dropped

    def address(self, host: int) -> str:
        return address(host)

    def command(self, host: int, command: list[str]) -> list[str]:
        """The command line that runs `command` on the host."""
        return ["nsenter", f"--net={self._namespaces[host]}", *command]

    def command_apart(self, host: int, command: list[str]) -> list[str]:
        """As `command`, but shares no memory and no process ids with other hosts, so it has a `host_id` of its own.

        The process is the only child of the one that is started. /sys, where UCX looks for network devices, is the
        host's own.
        """
        unshare = ["unshare", "--pid", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc"]
        script = 'mount -t sysfs sysfs /sys && exec "$@"'
        return self.command(host, [*unshare, "sh", "-c", script, "sh", *command])

    @contextmanager
    def on_host(self, host: int) -> Iterator[None]:
        """Moves this thread into the host's network, with the sockets, threads and processes that it creates."""
        with entered(self._namespaces[host]):
            yield


@contextmanager
def entered(namespace: Path) -> Iterator[None]:
    """Moves this thread into a network namespace, with the sockets, threads and processes that it creates."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        target = os.open(namespace, os.O_RDONLY)
        try:
            _enter(target)
            yield
        finally:
            _enter(before)
            os.close(target)
    finally:
        os.close(before)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
