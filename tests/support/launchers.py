"""Runs `tandem` in a process that is forked from the one preloaded process of this pytest worker, or starts cold."""

from __future__ import annotations

import asyncio
import atexit
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Protocol

from tandem.deploy.processes.process_configs import process_environment
from tandem.runtime.processes.command_line import SPACE
from tandem.runtime.processes.forked_child import ForkedChild
from tandem.runtime.processes.forked_process import ForkServer
from tests.support.product import with_tests

PRELOAD_TIMEOUT_S = 120.0
_IGNORED = {"PYTEST_CURRENT_TEST"}
READ_WHEN_USED = {"TANDEM_KV_CHECKSUMS"}
"""Variables that no import reads, so that a forked launcher may have others than the process that it comes from."""


class Process(Protocol):
    """What a test needs of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def stdout(self) -> IO[str] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int) -> None: ...
    def kill(self) -> None: ...
    def communicate(self, *, timeout: float | None = None) -> tuple[str, object]: ...


class _ForkedLauncher(ForkedChild):
    """With a pipe from its output."""

    def __init__(self, pid: int, stdout: IO[str]) -> None:
        super().__init__(pid)
        self.stdout = stdout

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, *, timeout: float | None = None) -> tuple[str, None]:
        """Raises subprocess.TimeoutExpired."""
        read: list[str] = []
        reading = threading.Thread(target=lambda: read.append(self.stdout.read()))
        reading.start()
        reading.join(timeout)
        if reading.is_alive():
            raise subprocess.TimeoutExpired("tandem", timeout or 0.0)
        self.wait(timeout)
        self.stdout.close()
        return read[0], None


_server: ForkServer | None = None
_environment: dict[str, str] = {}
_network = ""


def start_launcher(arguments: Sequence[str], added: Mapping[str, str] = MappingProxyType({})) -> Process | None:
    """Forks a launcher. added: further variables of its environment, of READ_WHEN_USED.

    Returns None if it must start cold, because the environment or this thread's network is another than at first.
    """
    global _server, _environment, _network
    network = str(Path("/proc/thread-self/ns/net").readlink())
    now = {name: value for name, value in os.environ.items() if name not in _IGNORED}
    if _server is None:
        _environment, _network = now, network
        environment = with_tests({**process_environment(1), **now})
        only_here = environment.keys() - now.keys()
        _server = ForkServer.spawn("tests.support.preload", environment, arguments=[SPACE, *only_here])
        atexit.register(_server.close)
    if (now, network) != (_environment, _network):
        return None
    read_fd, write_fd = os.pipe()
    try:
        pid = _fork(_server, arguments, added, write_fd)
    finally:
        os.close(write_fd)
    return _ForkedLauncher(pid, os.fdopen(read_fd))


def _fork(server: ForkServer, arguments: Sequence[str], added: Mapping[str, str], output_fd: int) -> int:
    """On a thread of its own, because the caller's may run a loop."""
    pids: list[int] = []

    async def fork() -> None:
        await server.until_ready(PRELOAD_TIMEOUT_S)
        fds = {1: output_fd, 2: output_fd}
        process = await server.start("launcher", arguments, fds=fds, environment=added, cwd=str(Path.cwd()))
        os.close(process._pidfd)
        pids.append(process.pid)

    thread = threading.Thread(target=lambda: asyncio.run(fork()))
    thread.start()
    thread.join()
    return pids[0]
