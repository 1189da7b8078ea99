"""Two simulated hosts (network namespaces), joined by a link of a given rate. Needs root, iproute2 and util-linux."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Self

from tests.support.faulty_network import entered

_DEVICE = "wire"
_MIB = 1 << 20


class LinkedHosts:
    """Context manager around hosts 0 and 1, joined by a veth pair whose ends send at `rate` (`tc` token buckets).

    Each namespace is held by a process that ends with this one, so nothing is left even if this process is killed.
    Raises OSError or CalledProcessError if the system does not allow it.
    """

    def __init__(self, rate: str) -> None:
        """rate: in the units of tc, such as 10gbit."""
        self._rate = rate
        self._namespaces: list[Path] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            holders = [self._stack.enter_context(_holder()) for _ in range(2)]
            for holder in holders:
                self._stack.callback(holder.kill)
                assert holder.stdout is not None
                if not holder.stdout.readline():
                    raise OSError("network namespaces are not allowed here")
            self._namespaces = [Path(f"/proc/{holder.pid}/ns/net") for holder in holders]
            first, second = (str(holder.pid) for holder in holders)
            link = f"ip link add {_DEVICE} netns {first} type veth peer name {_DEVICE} netns {second}"
            subprocess.run(link.split(), check=True)
            for host in range(2):
                for command in (
                    "ip link set lo up",
                    f"ip address add {self.address(host)}/24 dev {_DEVICE}",
                    f"ip link set {_DEVICE} up",
                    f"tc qdisc add dev {_DEVICE} root tbf rate {self._rate} burst 1mb latency 10ms",
                ):
                    subprocess.run(self.command(host, command.split()), check=True)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def address(self, host: int) -> str:
        return f"10.91.0.{host + 1}"

    def command(self, host: int, command: list[str]) -> list[str]:
        """The command line that runs `command` on the host."""
        return ["nsenter", f"--net={self._namespaces[host]}", *command]

    def on_host(self, host: int) -> AbstractContextManager[None]:
        """Moves this thread into the host's network, with the sockets, threads and processes that it creates."""
        return entered(self._namespaces[host])

    def gbit_per_s(self, num_bytes: int) -> float:
        """Returns the rate at which one plain socket moves `num_bytes` from host 1 to host 0."""
        with self.on_host(0), socket.create_server((self.address(0), 0)) as listener:
            sender = threading.Thread(target=self._send, args=(listener.getsockname()[1], num_bytes))
            sender.start()
            listener.settimeout(10)
            connection, _ = listener.accept()
        with connection:
            connection.settimeout(10)
            buffer, num_received, begun = bytearray(_MIB), 0, time.perf_counter()
            while received := connection.recv_into(buffer):
                num_received += received
            elapsed_s = time.perf_counter() - begun
        sender.join()
        return 8 * num_received / elapsed_s / 1e9

    def _send(self, port: int, num_bytes: int) -> None:
        data = bytes(_MIB)
        with self.on_host(1), socket.create_connection((self.address(0), port), 10) as connection:
            for _ in range(num_bytes // _MIB):
                connection.sendall(data)


def _holder() -> subprocess.Popen[bytes]:
    """Starts a process in a new network namespace that ends when its stdin is closed. It prints a line when it runs."""
    command = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
