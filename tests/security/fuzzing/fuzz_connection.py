"""Fuzzes the HTTP connection with raw bytes: pipelining, chunks, trailers, upgrades, slow writes, half-closes, resets.

    python -m tests.security.fuzzing.fuzz_connection [--inputs 100000] [--seed N] [--json FILE]

Starts two proxies with fake workers, one of them with TLS. Every request that arrives complete must get its complete
answer, every connection must be closed in time, and at the end no connection may be open and no memory have leaked.
The seed determines the inputs.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import struct
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import uvloop

from bench.support.report import Aim, Report, finish, new_parser
from tests.security.fuzzing.fuzz_connection_inputs import Input, make_input, split_answers
from tests.support.certificate import make_certificate
from tests.support.fake_workers import FakeWorkers, Proxy, make_tokenizer
from tests.support.processes import num_descriptors, process_memory

MODEL = "echo"
_AT_ONCE = 200
_WARM_UP = 2000
"""Inputs before memory is measured for the first time: caches and buffers reach their size."""
_PATIENCE_S = 60.0
"""A server that has not closed a connection after this time hangs."""
_CLIENT_TIMEOUT_S, _KEEP_ALIVE_S = 4.0, 2.0
"""Of the proxies that this module starts, so that incomplete requests end soon."""
_RESET = struct.pack("ii", 1, 0)


class ConnectionFuzzer:
    """`outcomes` counts connections by input and by how they ended; `statuses` counts answers.

    tls: where the port speaks TLS. waits: for the server to close a connection whose request is incomplete; otherwise
    the client leaves after a second.
    """

    def __init__(self, seed: int, port: int, model: str, tls: ssl.SSLContext | None = None, waits: bool = True) -> None:
        self._seed = seed
        self._port = port
        self._model = model
        self._tls = tls
        self._waits = waits
        self.outcomes: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()

    async def run(self, first: int, count: int) -> None:
        """Sends the inputs from number `first` on.

        Raises TimeoutError when the proxy hangs, and ValueError when a request gets a wrong or incomplete answer.
        """
        numbers = iter(range(first, first + count))

        async def send_some() -> None:
            for number in numbers:
                await self._send(make_input(random.Random(f"{self._seed} {number}"), self._model), number)

        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(send_some())

    async def _send(self, sent: Input, number: int) -> None:
        # Some clients of a TLS port speak no TLS.
        is_clear = self._tls is None or sent.kind in ("bytes", "tls record")
        received = bytearray()
        ended: str = sent.end
        try:
            async with asyncio.timeout(_PATIENCE_S):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", self._port, ssl=None if is_clear else self._tls
                )
                reading = asyncio.create_task(self._read(reader, received))
                try:
                    await self._write(sent, writer)
                    if sent.end in ("read", "half_close"):
                        await asyncio.wait([reading], timeout=None if self._waits or sent.is_valid else 1.0)
                        ended = await reading if reading.done() else "left"
                finally:
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
                    writer.transport.abort()
        except TimeoutError as error:
            what = f"the server did not close the connection of input {number} ({sent.kind}) after {received[-300:]!r}"
            raise TimeoutError(what) from error
        self._check(sent, number, bytes(received), ended, speaks=self._tls is None or not is_clear)

    async def _write(self, sent: Input, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            for piece in sent.pieces:
                if writer.is_closing():  # the server has closed
                    return
                writer.write(piece)
                await writer.drain()
                if sent.pause_s:
                    await asyncio.sleep(sent.pause_s)
            if writer.is_closing():
                return
            if sent.end == "half_close" and writer.can_write_eof():
                writer.write_eof()
            elif sent.end == "reset":
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    async def _read(self, reader: asyncio.StreamReader, received: bytearray) -> str:
        """Reads until the server closes. Returns how it did."""
        try:
            while piece := await reader.read(65536):
                received += piece
        except (ConnectionError, ssl.SSLError):
            return "reset by the server"
        return "closed by the server"

    def _check(self, sent: Input, number: int, received: bytes, ended: str, speaks: bool) -> None:
        """speaks: the client speaks TLS where the server does."""
        statuses, rest = split_answers(received, sent.expected)
        self.statuses.update(statuses)
        self.outcomes[f"{sent.kind}: {ended}"] += 1
        if 500 in statuses:
            raise ValueError(f"input {number} ({sent.kind}) made an internal error")
        if sent.end != "read" or ended == "left" or not speaks:
            return
        wanted = [each.status for each in sent.expected]
        is_right = statuses == wanted if sent.is_valid else statuses[: len(wanted)] == wanted
        if not is_right or (rest and ended != "reset by the server"):
            got = f"{statuses} and {rest[:300]!r} of {received[:300]!r}"
            raise ValueError(f"input {number} ({sent.kind}) got {got} instead of {wanted}")


def fuzz_connections(pid: int, fuzzer: ConnectionFuzzer, num_inputs: int) -> dict[str, Any]:
    """Sends inputs to the proxy with this process id. Returns the figures of the run.

    Raises TimeoutError where connections stay open at the end.
    """
    num_open = num_descriptors(pid)
    warm_up = min(_WARM_UP, num_inputs // 4)
    uvloop.run(fuzzer.run(0, warm_up))
    before_mib = process_memory(pid).own_mib
    started = time.monotonic()
    uvloop.run(fuzzer.run(warm_up, num_inputs - warm_up))
    took_s = time.monotonic() - started
    deadline = time.monotonic() + _PATIENCE_S
    while num_descriptors(pid) > num_open + 2:  # a large body has one for a moment, and so has a status request
        if time.monotonic() > deadline:
            raise TimeoutError(f"{num_descriptors(pid) - num_open} connections are still open after the last input")
        time.sleep(0.2)
    return {
        "num_inputs": num_inputs,
        "inputs_per_s": round((num_inputs - warm_up) / took_s, 1),
        "memory_growth_mib": round(process_memory(pid).own_mib - before_mib, 1),
        "open_descriptors": [num_open, num_descriptors(pid)],
        "outcomes": dict(sorted(fuzzer.outcomes.items())),
        "statuses": {str(status): count for status, count in sorted(fuzzer.statuses.items())},
    }


def run(num_inputs: int, seed: int) -> dict[str, dict[str, Any]]:
    """Starts both proxies and sends half of the inputs to each. Returns the figures of each."""
    limits: dict[str, Any] = {
        "client_timeout_s": _CLIENT_TIMEOUT_S,
        "keep_alive_s": _KEEP_ALIVE_S,
        "log_level": "error",
    }
    with tempfile.TemporaryDirectory(prefix="fuzz") as name:
        folder = Path(name)
        make_tokenizer(folder)
        certificate, key = make_certificate(folder)
        tls_files: dict[str, Any] = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
        tls = ssl.create_default_context(cafile=str(certificate))
        with (
            Proxy(folder, name="clear", **limits) as clear,
            Proxy(folder, name="tls", **limits, **tls_files) as encrypted,
        ):
            workers = FakeWorkers(folder, [clear.control, encrypted.control])
            clear.wait_for(200)
            try:
                return {
                    "clear": fuzz_connections(
                        clear.process.pid, ConnectionFuzzer(seed, clear.port, MODEL), num_inputs // 2
                    ),
                    "tls": fuzz_connections(
                        encrypted.process.pid, ConnectionFuzzer(seed + 1, encrypted.port, MODEL, tls), num_inputs // 2
                    ),
                }
            finally:
                workers.stop()


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="number of inputs (default: 100000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs")
    options = parser.parse_args()
    figures = run(2000 if options.quick else options.inputs, options.seed)
    growth = max(each["memory_growth_mib"] for each in figures.values())
    finish(Report.of("fuzz_connection", figures, [Aim.of("memory growth, MiB", growth, 64, "lower")]), options.json)


if __name__ == "__main__":
    main()
