"""Throughput of the CPU KV connectors between two processes, relative to the raw transport in the same run.

    python -m bench.kv_transfer [--connectors ipc,tcp,tls,gloo] [--quick] [--json FILE]

The raw transport of `ipc` is memmove into the peer's mapped memory; that of `gloo` is one send and receive of the whole
size; that of `tcp`, without keys and with them (`tls`), is one plain socket. Connectors move blocks of 1 MiB (64 tokens
of a 1 B model), adjacent in the pool or scattered, and announce every transfer to the receiving process as the workers
do. Copying scattered blocks is slower than copying one range for any method, so scattered `ipc` transfers are compared
with a scattered memmove. GPUs: `bench.gpu.kv_transfer`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, cast

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, ProcessGroup
from torch.distributed import ProcessGroupGloo

from bench.support.report import Aim, Report, add_common_options, finish
from tandem.kv_transfer.connector import DataNetwork, KVConnector, Peer
from tandem.kv_transfer.connectors.mapped_memory import map_peer_pool
from tandem.kv_transfer.connectors.process_group import StoreServer
from tandem.kv_transfer.registry import load_connector
from tandem.protocol.messages.transfer import ConnectorParams
from tandem.protocol.network_keys import load_keys, make_keys
from tandem.protocol.tls_identity import tls_contexts
from tandem.runtime.errors import KVTransferFailed

HOST = "127.0.0.1"
MIB = 2**20
BLOCK_BYTES = MIB
SIZES = (MIB, 16 * MIB, 64 * MIB, 256 * MIB)
PAIR_COUNTS = (1, 4)
ROUND_BYTES = 64 * MIB  # smaller transfers are repeated until a round moves this much per pair
STEADY_BYTES = 16 * MIB  # the aims apply from this size on
NUM_ROUNDS = 5
AIMS = {"ipc": 0.7, "tcp": 0.9, "tls": 0.6, "gloo": 0.85}
TIMEOUT_S = 120.0

Mode = Literal["raw", "raw scattered", "adjacent", "scattered"]
Side = Literal["source", "destination"]
Copy = Callable[[int, int], None]
"""Moves the first N blocks of a pair M times."""


def modes_of(connector: str) -> tuple[Mode, ...]:
    return ("raw", "raw scattered", "adjacent", "scattered") if connector == "ipc" else ("raw", "adjacent", "scattered")


def raw_of(connector: str, mode: Mode) -> Mode:
    """Returns the raw mode that a mode of the connector is compared with."""
    return "raw scattered" if connector == "ipc" and mode == "scattered" else "raw"


class Round(msgspec.Struct, frozen=True):
    """Announces `count` transfers of `num_blocks` over each pair to the receiving process."""

    mode: Mode
    num_blocks: int
    count: int


class RoundDone(msgspec.Struct, frozen=True):
    """Result of a round: end time on the clock of both processes, and CPU seconds of the receiving process."""

    ended_at: float
    cpu_s: float
    correct: bool


class Figure(msgspec.Struct, frozen=True):
    """`gb_per_s` and `ratio` (to raw in the same round) are medians over the rounds."""

    connector: str
    pairs: int
    size_bytes: int
    gb_per_s: dict[Mode, float]
    ratio: dict[Mode, float]
    receiver_cpu_ms_per_gib: dict[Mode, float]


class Countdown:
    """Counts completions across threads and keeps the first error."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._error: KVTransferFailed | None = None

    def done(self, error: KVTransferFailed | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left == 0 or error is not None:
                self._event.set()

    def wait(self) -> None:
        """Raises KVTransferFailed with the first error, or after TIMEOUT_S."""
        if not self._event.wait(TIMEOUT_S):
            raise KVTransferFailed(f"the transfers did not end within {TIMEOUT_S:.0f} s")
        if self._error is not None:
            raise self._error


def run_in_threads(copies: list[Copy], num_blocks: int, count: int) -> None:
    """Runs each pair's copies on its own thread, as workers do."""
    countdown = Countdown(len(copies))

    def run(copy: Copy) -> None:
        try:
            copy(num_blocks, count)
        except Exception as error:
            countdown.done(KVTransferFailed(str(error)))
        else:
            countdown.done(None)

    for copy in copies:
        threading.Thread(target=run, args=(copy,), daemon=True).start()
    countdown.wait()


def block_ids(mode: Mode, num_blocks: int, side: Side) -> list[int]:
    """Returns block ids within one pair's share of the pool; both processes get the same order."""
    ids = list(range(num_blocks))
    if mode in ("scattered", "raw scattered"):
        random.Random(f"{side} {num_blocks}").shuffle(ids)
    return ids


def raw_gloo(store: Path, pair: int, rank: int, blocks: torch.Tensor) -> Copy:
    """Builds a two-rank gloo group and returns its bare send (rank 0) or receive (rank 1)."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    group = cast(ProcessGroup, ProcessGroupGloo(PrefixStore(f"raw-{pair}", FileStore(str(store), 2)), rank, 2, options))

    def move(num_blocks: int, count: int) -> None:
        for _ in range(count):
            if rank == 0:
                group.send([blocks[:num_blocks]], 1, 0).wait()
            else:
                group.recv([blocks[:num_blocks]], 0, 0).wait()

    return move


def raw_socket(store: Path, pair: int, rank: int, blocks: torch.Tensor) -> Copy:
    """Connects two plain sockets and returns a bare send (rank 0) or receive (rank 1)."""
    meeting = PrefixStore(f"raw-{pair}", FileStore(str(store), 2))
    if rank == 0:
        connection = socket.create_connection((HOST, int(meeting.get("port"))), TIMEOUT_S)
    else:
        with socket.create_server((HOST, 0)) as listener:
            meeting.set("port", str(listener.getsockname()[1]))
            connection, _ = listener.accept()

    def move(num_blocks: int, count: int) -> None:
        data = blocks[:num_blocks].view(-1).numpy().data
        for _ in range(count):
            if rank == 0:
                connection.sendall(data)
            elif connection.recv_into(data, 0, socket.MSG_WAITALL) != len(data):
                raise ConnectionError("the sender closed the connection")

    return move


RAW: dict[str, Callable[[Path, int, int, torch.Tensor], Copy]] = {
    "gloo": raw_gloo, "tcp": raw_socket, "tls": raw_socket,
}  # fmt: skip
"""The raw transport of each connector that meets its peer in a store."""


def opened_by(connector: str, store: Path) -> tuple[KVConnector, DataNetwork]:
    """Returns the connector and its network. "tls" is the connector `tcp` with keys, in a folder beside the store."""
    if connector != "tls":
        return load_connector(connector), DataNetwork(HOST)
    return load_connector("tcp"), DataNetwork(HOST, tls_contexts(load_keys(keys_beside(store), "worker")))


def keys_beside(store: Path) -> Path:
    return store.parent / "keys"


def raw_ipc(source: torch.Tensor, destination: torch.Tensor, mode: Mode) -> Copy:
    """Returns a memmove of the whole range, or of block after block. ctypes releases the GIL during each."""

    def copy(num_blocks: int, count: int) -> None:
        block_bytes = source.shape[1]
        if mode == "raw":
            moves = [(destination.data_ptr(), source.data_ptr(), num_blocks * block_bytes)]
        else:
            pairs = zip(block_ids(mode, num_blocks, "destination"), block_ids(mode, num_blocks, "source"), strict=True)
            moves = [
                (destination.data_ptr() + to * block_bytes, source.data_ptr() + from_ * block_bytes, block_bytes)
                for to, from_ in pairs
            ]
        for _ in range(count):
            for move in moves:
                ctypes.memmove(*move)

    return copy


class DecodeSide:
    """Receiving process: owns the destination pool, one share per pair, and runs rounds until it gets None."""

    def __init__(self, peer: Connection, connector: str, num_pairs: int, pair_bytes: int, store: Path) -> None:
        torch.set_num_threads(1)
        self._peer = peer
        num_bytes = num_pairs * pair_bytes
        server: StoreServer | None = None
        if connector == "ipc":
            fd = os.memfd_create("bench-kv-pool", os.MFD_CLOEXEC)
            os.ftruncate(fd, num_bytes)
            pool = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)
            params = ConnectorParams(os.getpid(), fd, num_bytes, num_bytes // BLOCK_BYTES)
        else:
            pool = torch.zeros(num_bytes, dtype=torch.uint8)
            server = StoreServer(HOST)
            params = ConnectorParams(store_host=HOST, store_port=server.port)
        peer.send(params)
        self._shares = pool.view(num_pairs, -1, BLOCK_BYTES)
        ready = Countdown(num_pairs)
        made_by, network = opened_by(connector, store)
        self._receivers = [
            made_by.open_receiver(
                f"pair-{i}",
                HashStore if server is None else partial(server.store, f"pair-{i}"),
                pool.view(-1, BLOCK_BYTES),
                network,
                ready.done,
            )
            for i in range(num_pairs)
        ]
        ready.wait()
        self._raw = (
            [] if server is None else [RAW[connector](store, i, 1, share) for i, share in enumerate(self._shares)]
        )

    def serve(self) -> None:
        while (round_ := self._peer.recv()) is not None:
            cpu_s = time.process_time()
            if round_.mode in ("adjacent", "scattered"):
                num_transfers = round_.count * len(self._shares)
                countdown = Countdown(num_transfers)
                for _ in range(num_transfers):
                    pair, ids = self._peer.recv()
                    self._receivers[pair].receive(ids, countdown.done)
                countdown.wait()
            elif self._raw:
                run_in_threads(self._raw, round_.num_blocks, round_.count)
            else:
                self._peer.recv()  # the sender reports that everything is written
            cpu_s = time.process_time() - cpu_s
            self._peer.send(RoundDone(time.perf_counter(), cpu_s, self._is_correct(round_)))

    def _is_correct(self, round_: Round) -> bool:
        """Checks the source block number in the first 8 bytes of each block and overwrites it."""
        source = block_ids(round_.mode, round_.num_blocks, "source")
        destination = block_ids(round_.mode, round_.num_blocks, "destination")
        numbers = self._shares[:, destination, :8].view(torch.int64)[..., 0]  # [num_pairs, num_blocks]
        first = torch.arange(len(self._shares))[:, None] * self._shares.shape[1]
        correct = torch.equal(numbers, torch.tensor(source)[None] + first)
        self._shares[:, destination, :8] = 0xFF
        return correct


def serve_decode_side(peer: Connection, connector: str, num_pairs: int, pair_bytes: int, store: Path) -> None:
    DecodeSide(peer, connector, num_pairs, pair_bytes, store).serve()


class PrefillSide:
    """Sending side, in the process of the benchmark: owns the source pool and times the rounds."""

    def __init__(self, peer: Connection, connector: str, num_pairs: int, pair_bytes: int, store: Path) -> None:
        self._peer = peer
        self._connector = connector
        pool = torch.full((num_pairs * pair_bytes,), 1, dtype=torch.uint8)
        blocks = pool.view(-1, BLOCK_BYTES)
        blocks[:, :8] = torch.arange(len(blocks))[:, None].view(torch.uint8)
        self._shares = pool.view(num_pairs, -1, BLOCK_BYTES)
        params: ConnectorParams = peer.recv()
        ready = Countdown(num_pairs)
        made_by, network = opened_by(connector, store)
        self._is_one_sided = made_by.one_sided
        self._senders = [
            made_by.open_sender(Peer(f"pair-{i}", params), blocks, network, ready.done) for i in range(num_pairs)
        ]
        ready.wait()
        self._raw: dict[Mode, list[Copy]] = {}
        if connector == "ipc":
            mapped = map_peer_pool(params).view(num_pairs, -1, BLOCK_BYTES)
            for mode in ("raw", "raw scattered"):
                self._raw[mode] = [raw_ipc(a, b, mode) for a, b in zip(self._shares, mapped, strict=True)]
        else:
            self._raw["raw"] = [RAW[connector](store, i, 0, share) for i, share in enumerate(self._shares)]

    def run(self, mode: Mode, num_blocks: int, count: int) -> tuple[float, float]:
        """Returns seconds until both sides know that all transfers ended, and CPU seconds of the receiving process."""
        self._peer.send(Round(mode, num_blocks, count))
        started = time.perf_counter()
        if mode in ("adjacent", "scattered"):
            self._ship(mode, num_blocks, count)
        else:
            run_in_threads(self._raw[mode], num_blocks, count)
            if self._connector == "ipc":
                self._peer.send(None)
        ended = time.perf_counter()
        done: RoundDone = self._peer.recv()
        if not done.correct:
            sys.exit(f"error: {self._connector} delivered wrong bytes ({mode}, {num_blocks} blocks)")
        return max(ended, done.ended_at) - started, done.cpu_s

    def _ship(self, mode: Mode, num_blocks: int, count: int) -> None:
        countdown = Countdown(count * len(self._senders))
        source, destination = block_ids(mode, num_blocks, "source"), block_ids(mode, num_blocks, "destination")
        pipe_lock = threading.Lock()

        def announce(pair: int, ids: list[int], error: KVTransferFailed | None) -> None:
            if error is None and self._is_one_sided:
                with pipe_lock:
                    self._peer.send((pair, ids))
            countdown.done(error)

        for _ in range(count):
            for pair, sender in enumerate(self._senders):
                first = pair * self._shares.shape[1]
                dst = [first + i for i in destination]
                if not self._is_one_sided:
                    self._peer.send((pair, dst))
                sender.send([first + i for i in source], dst, partial(announce, pair, dst))
        countdown.wait()


@contextlib.contextmanager
def both_sides(connector: str, num_pairs: int, pair_bytes: int) -> Iterator[PrefillSide]:
    """Yields the sending side, connected to a new receiving process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (connector, num_pairs, pair_bytes, Path(folder) / "store")
        make_keys(keys_beside(arguments[3]))
        process = context.Process(target=serve_decode_side, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        try:
            yield PrefillSide(ours, *arguments)
            ours.send(None)
            process.join(TIMEOUT_S)
        finally:
            process.kill()


def raw_transfer_ms(connector: str, num_bytes: int, num_rounds: int = 15) -> float:
    """Returns the median time of one raw transfer from process to process. `num_bytes`: a multiple of BLOCK_BYTES."""
    with both_sides(connector, 1, num_bytes) as side:
        times = [side.run("raw", num_bytes // BLOCK_BYTES, 1)[0] for _ in range(num_rounds + 1)]
    return 1000 * statistics.median(times[1:])  # the first round pays for page faults


def measure(side: PrefillSide, connector: str, num_pairs: int, size: int, num_rounds: int) -> Figure:
    modes = modes_of(connector)
    num_blocks, count = size // BLOCK_BYTES, max(1, ROUND_BYTES // size)
    num_bytes = size * count * num_pairs
    rates: dict[Mode, list[float]] = {mode: [] for mode in modes}
    cpu: dict[Mode, list[float]] = {mode: [] for mode in modes}
    for index in range(num_rounds + 1):
        turn = index % len(modes)  # rotates the order, so that no mode always follows the same one
        for mode in modes[turn:] + modes[:turn]:
            elapsed_s, cpu_s = side.run(mode, num_blocks, count)
            if index:  # the first round pays for page faults
                rates[mode].append(num_bytes / elapsed_s / 1e9)
                cpu[mode].append(1000 * cpu_s / (num_bytes / 2**30))
    return Figure(
        connector,
        num_pairs,
        size,
        gb_per_s={mode: statistics.median(rates[mode]) for mode in modes},
        ratio={
            mode: statistics.median(a / b for a, b in zip(rates[mode], rates[raw_of(connector, mode)], strict=True))
            for mode in modes[-2:]
        },
        receiver_cpu_ms_per_gib={mode: statistics.median(cpu[mode]) for mode in modes},
    )


def aims(figures: list[Figure]) -> list[Aim]:
    return [
        Aim.of(
            f"{f.connector}, {f.pairs} pair(s), {f.size_bytes // MIB} MiB, {mode}: rate / {raw_of(f.connector, mode)}",
            ratio,
            AIMS[f.connector],
            "higher",
        )
        for f in figures
        for mode, ratio in f.ratio.items()
        if f.size_bytes >= STEADY_BYTES
    ]


def print_table(figures: list[Figure]) -> None:
    table = Table("connector", "pairs", "MiB", "raw GB/s", "raw scattered", "adjacent", "scattered", "CPU ms/GiB")
    for f in figures:
        rates = {mode: f"{rate:.2f}" for mode, rate in f.gb_per_s.items()}
        rates |= {mode: f"{rates[mode]} ({ratio:.2f})" for mode, ratio in f.ratio.items()}
        cells = (rates.get(mode, "") for mode in modes_of("ipc"))
        cpu = " / ".join(f"{cpu_ms:.0f}" for cpu_ms in f.receiver_cpu_ms_per_gib.values())
        table.add_row(f.connector, str(f.pairs), str(f.size_bytes // MIB), *cells, cpu)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kv_transfer", description=__doc__)
    parser.add_argument("--connectors", default="ipc,tcp,tls,gloo", help="comma-separated (default: %(default)s)")
    add_common_options(parser)
    options = parser.parse_args()
    connectors = options.connectors.split(",")
    if unknown := set(connectors) - set(AIMS):
        parser.error(f"unknown connector {', '.join(sorted(unknown))}; choose from {', '.join(AIMS)}")
    torch.set_num_threads(1)
    sizes = [size for size in SIZES if not options.quick or size <= STEADY_BYTES]
    figures = []
    for connector, num_pairs in itertools.product(connectors, PAIR_COUNTS):
        with both_sides(connector, num_pairs, max(sizes)) as side:
            num_rounds = 2 if options.quick else NUM_ROUNDS
            figures += [measure(side, connector, num_pairs, size, num_rounds) for size in sizes]
    print_table(figures)
    finish(Report.of("kv_transfer", {"transfers": figures}, aims(figures)), options.json)


if __name__ == "__main__":
    main()
