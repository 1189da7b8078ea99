"""Polls GET paths from a separate process and records the latency of each response."""

from __future__ import annotations

import http.client
import multiprocessing
import socket
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Self

from bench.support.latency import Distribution

CONTROL = "control"
"""Name of a server that does nothing. Its latency shows how much of a delay is due to the machine."""
_PAUSE_S = 0.002
_TIMEOUT_S = 120.0
_CONTROL_RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
_spawn = multiprocessing.get_context("spawn")  # a forked child would inherit locks and sockets


def poll_row(spread: Distribution) -> dict[str, float]:
    """Returns the columns of a table of latencies."""
    return {"p50 ms": spread.p50, "p99 ms": spread.p99, "max ms": spread.max}


class Poller:
    """Context manager that polls each path, and the control server, between `begin` and `end`."""

    def __init__(self, paths: Mapping[str, int]) -> None:
        """`paths` maps each path to its port on the loopback address."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._pipe, far_end = _spawn.Pipe()
        targets = [*paths.items(), (CONTROL, listener.getsockname()[1])]
        self._processes = [
            _spawn.Process(target=_serve_control, args=(listener,), daemon=True),
            _spawn.Process(target=_poll, args=(targets, far_end), daemon=True),
        ]

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def begin(self) -> None:
        """Returns when polling has started."""
        self._pipe.send("begin")
        self._pipe.recv()

    def end(self) -> dict[str, Distribution]:
        """Returns latencies since `begin`, by path. Raises RuntimeError when a poll failed."""
        self._pipe.send("end")
        latencies_s = self._pipe.recv()
        if isinstance(latencies_s, str):
            raise RuntimeError(latencies_s)
        spreads = {name: Distribution.of_seconds(values) for name, values in latencies_s.items()}
        return {name: spread for name, spread in spreads.items() if spread is not None}


def _poll(targets: list[tuple[str, int]], pipe: Connection) -> None:
    connections = {name: http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S) for name, port in targets}
    while pipe.recv() == "begin":
        latencies_s: dict[str, list[float]] = {name: [] for name in connections}
        pipe.send("polling")
        try:
            while not pipe.poll():
                for name, connection in connections.items():
                    started = time.perf_counter()
                    connection.request("GET", "/" if name == CONTROL else name)
                    response = connection.getresponse()
                    response.read()
                    if response.status != 200:
                        raise ValueError(f"{name} returned {response.status}")
                    latencies_s[name].append(time.perf_counter() - started)
                    time.sleep(_PAUSE_S)
            result: dict[str, list[float]] | str = latencies_s
        except (OSError, ValueError, http.client.HTTPException) as error:
            result = f"polling failed: {error!r}"
        pipe.recv()
        pipe.send(result)


def _serve_control(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while connection.recv(65536):
        connection.sendall(_CONTROL_RESPONSE)
