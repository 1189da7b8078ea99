"""Polls small GET paths from a process of its own, over raw kept-alive sockets, and notes how long each answer took.

Beside the server it polls a control: an HTTP server that does nothing, in another process. What the control is late by
is the machine's doing, not the server's.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Self

from bench.latency import Distribution

CONTROL = "control"
_PAUSE_S = 0.002
"""Between two polls. Below what can be noticed as load, and often enough for a p99 within a few seconds."""
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
_spawn = multiprocessing.get_context("spawn")  # no locks or sockets of the parent


class Poller:
    """A context manager; polls from `begin` to `end`."""

    def __init__(self, paths: Mapping[str, int]) -> None:
        """paths: to the port where each is."""
        self._paths = paths
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> Self:
        listener = socket.create_server(("127.0.0.1", 0))
        control_port = listener.getsockname()[1]
        self._pipe, far_end = _spawn.Pipe()
        targets = [*self._paths.items(), (CONTROL, control_port)]
        self._processes = [
            _spawn.Process(target=_serve_control, args=(listener,), daemon=True),
            _spawn.Process(target=_poll, args=(targets, far_end), daemon=True),
        ]
        for process in self._processes:
            process.start()
        listener.close()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def begin(self) -> None:
        self._pipe.send("begin")
        self._pipe.recv()

    def end(self) -> dict[str, Distribution]:
        """By path, in milliseconds, since `begin`. Raises RuntimeError when the server closed a connection."""
        self._pipe.send("end")
        seconds = self._pipe.recv()
        if isinstance(seconds, str):
            raise RuntimeError(seconds)
        told = {name: Distribution.of_seconds(values) for name, values in seconds.items()}
        return {name: spread for name, spread in told.items() if spread is not None}


def _poll(targets: list[tuple[str, int]], pipe: Connection) -> None:
    sockets: dict[str, tuple[socket.socket, bytes]] = {}
    for name, port in targets:
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        path = "/" if name == CONTROL else name
        sockets[name] = connection, f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    try:
        while pipe.recv() == "begin":
            taken: dict[str, list[float]] = {name: [] for name in sockets}
            pipe.send("polling")
            while not pipe.poll():
                for name, (connection, request) in sockets.items():
                    begun = time.perf_counter()
                    connection.sendall(request)
                    _read_answer(connection)
                    taken[name].append(time.perf_counter() - begun)
                    time.sleep(_PAUSE_S)
            pipe.recv()
            pipe.send(taken)
    except (OSError, ValueError) as error:
        pipe.send(f"polling failed: {error!r}")
    except EOFError:  # the parent has gone
        return


def _read_answer(connection: socket.socket) -> None:
    """One answer, whole; the next poll begins with the next."""
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        data += _receive(connection)
    head = data[:end].lower()
    if not head.startswith(b"http/1.1 200"):
        raise ValueError(head.split(b"\r\n")[0].decode())
    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    missing = length - (len(data) - end - 4)
    while missing > 0:
        missing -= len(_receive(connection))


def _receive(connection: socket.socket) -> bytes:
    piece = connection.recv(65536)
    if not piece:
        raise ConnectionError("the server closed the connection")
    return piece


def _serve_control(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while connection.recv(65536):
        connection.sendall(_ANSWER)
