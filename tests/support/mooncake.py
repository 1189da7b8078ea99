"""Finds Mooncake for the tests that need it, and runs a store on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil
import pytest

START_TIMEOUT_S = 30.0
_PUT = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", sys.argv[1]) == 0
value = sys.stdin.buffer.read()
assert all(store.put(key, value) == 0 for key in sys.argv[2:])
"""


def mooncake_folder() -> Path:
    """Returns the folder of the installed package. Skips the test where Mooncake is not there."""
    folder = os.environ.get("MOONCAKE_FOLDER")
    if not folder:
        pytest.skip("MOONCAKE_FOLDER names no folder with Mooncake (pip install --target FOLDER, see .ci/clients.sh)")
    return Path(folder)


def mooncake_environment() -> dict[str, str]:
    """Returns variables with which a process finds Mooncake. Skips the test where Mooncake is not there."""
    folder = str(mooncake_folder())
    return {"PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), folder])}


class MooncakeStore:
    """A master, and one process that gives the store memory. segment_bytes: its size."""

    def __init__(self, segment_bytes: int = 64 << 20) -> None:
        self._programs = mooncake_folder() / "mooncake"
        self._port, client_port = _free_ports(2)
        self.address = f"127.0.0.1:{self._port}"
        self.master = self.start_master()
        self.memory = self._start(
            "mooncake_client",
            "--host=127.0.0.1",
            f"--port={client_port}",
            f"--global_segment_size={segment_bytes}",
            f"--master_server_address={self.address}",
            "--metadata_server=P2PHANDSHAKE",
        )
        _wait_for_port(client_port)

    def start_master(self) -> subprocess.Popen[bytes]:
        """Starts a master at the store's address; the one before must have ended."""
        self.master = self._start(
            "mooncake_master",
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self._port}",
            "--metrics_host=127.0.0.1",
            "--metrics_port=0",
        )
        _wait_for_port(self._port)
        return self.master

    def put(self, keys: Sequence[str], value: bytes) -> None:
        """Stores the same bytes under all keys, as a client that knows nothing of Tandem.

        Tries again for a while: on a busy machine the master may take the store's memory for lost until it reports.
        """
        command = [sys.executable, "-c", _PUT, self.address, *keys]
        environment, deadline = os.environ | mooncake_environment(), time.monotonic() + START_TIMEOUT_S
        while subprocess.run(command, input=value, env=environment, timeout=60).returncode != 0:
            assert time.monotonic() < deadline, f"the store at {self.address} takes no value"

    def __enter__(self) -> MooncakeStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in (self.memory, self.master):
            process.kill()
            process.wait()

    def _start(self, program: str, *flags: str) -> subprocess.Popen[bytes]:
        path = self._programs / program
        return subprocess.Popen(
            [path, *flags], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def freeze(process: subprocess.Popen[bytes]) -> None:
    """Stops a process, and waits until the kernel has done so."""
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
