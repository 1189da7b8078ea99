"""KV connectors between two real processes against their raw transport, in the same run and by turns.

    python -m bench.kv_transfer [--quick] [--json FILE]

Raw for `ipc` is a plain copy into the peer's mapped memory (memmove, one range per pair); raw for `gloo` and `nccl` is
one bare send and recv of the whole size. The connectors move the same bytes as blocks, once side by side ("adjacent")
and once each on its own ("scattered"), and every transfer is announced to the receiving process, as the workers do.

A copy of scattered blocks is slower than one of a single range, whoever does it (the C library copies large ranges past
the cache), so for `ipc` there is a plain copy of scattered blocks too ("raw scattered"), and that is what its scattered
blocks are held against. For `gloo` and `nccl` it is the bare send and recv in either case. Blocks are 1 MiB, as 64
tokens of a 1 B model. Blocks of 64 KiB, smaller than those of models in use, are shown besides, without an aim when
scattered.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import HashStore

from bench.report import Aim, Report, add_common_options, finish
from tandem.kv_transfer.connector import Peer
from tandem.kv_transfer.connectors.mapped_memory import map_peer_pool
from tandem.kv_transfer.connectors.process_group import (
    ProcessGroupReceiver,
    ProcessGroupSender,
    StoreServer,
    connect_store,
)
from tandem.kv_transfer.registry import load_connector
from tandem.protocol.messages.transfer import ConnectorParams
from tandem.runtime.errors import KVTransferFailed

HOST = "127.0.0.1"
KIB, MIB = 2**10, 2**20
SMALL_BLOCK_BYTES, BLOCK_BYTES = 64 * KIB, MIB
SIZES = {
    SMALL_BLOCK_BYTES: (64 * KIB, 16 * MIB, 64 * MIB),
    BLOCK_BYTES: (MIB, 16 * MIB, 64 * MIB, 256 * MIB),
}  # by bytes of a block
PAIR_COUNTS = (1, 4)
ROUND_BYTES = 64 * MIB  # small transfers are repeated until a round moves so much per pair
STEADY_BYTES = 16 * MIB  # the aims hold from this size on
NUM_ROUNDS = 5
AIMS = {"ipc": 0.7, "gloo": 0.85, "nccl": 0.85}
TIMEOUT_S = 120.0

Mode = Literal["raw", "raw scattered", "adjacent", "scattered"]


def modes_of(connector: str) -> tuple[Mode, ...]:
    return ("raw", "raw scattered", "adjacent", "scattered") if connector == "ipc" else ("raw", "adjacent", "scattered")


def raw_of(connector: str, mode: Mode) -> Mode:
    """What a connector's mode is held against."""
    return "raw scattered" if connector == "ipc" and mode == "scattered" else "raw"


class Round(msgspec.Struct, frozen=True):
    """Sending to receiving process: `count` transfers of `num_blocks` over each pair begin."""

    mode: Mode
    num_blocks: int
    count: int


class Announcement(msgspec.Struct, frozen=True):
    """One transfer over one pair is on the data path, or already there; None ends the process."""

    pair: int
    block_ids: list[int]


class RoundDone(msgspec.Struct, frozen=True):
    """Receiving to sending process. at: clock of both processes, in seconds. cpu_s: what the round cost here."""

    at: float
    cpu_s: float
    correct: bool


class Figure(msgspec.Struct, frozen=True):
    """gb_per_s: medians of all rounds. ratio: median over the rounds of connector / its raw of the same round."""

    connector: str
    pairs: int
    block_bytes: int
    size_bytes: int
    gb_per_s: dict[Mode, float]
    ratio: dict[Mode, float]
    receiver_cpu_ms_per_gib: dict[Mode, float]


class Countdown:
    """Set when `done` was called so often; keeps the first error."""

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
        if not self._event.wait(TIMEOUT_S):
            raise KVTransferFailed(f"no end of the transfers within {TIMEOUT_S:.0f} s")
        if self._error is not None:
            raise self._error


def in_threads(jobs: list[Callable[[], None]]) -> None:
    """All at once, each on a thread of its own, as pairs are."""
    countdown = Countdown(len(jobs))

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            countdown.done(KVTransferFailed(str(error)))
        else:
            countdown.done(None)

    for job in jobs:
        threading.Thread(target=run, args=(job,), daemon=True).start()
    countdown.wait()


def block_ids(mode: Mode, num_blocks: int, of: Literal["source", "destination"]) -> list[int]:
    """Blocks of one pair's part of the pool: a run, or no two neighbours side by side. The same in every process."""
    ids = list(range(num_blocks))
    if mode in ("scattered", "raw scattered"):
        random.Random(f"{of} {num_blocks}").shuffle(ids)
    return ids


def device_of(connector: str, side: Literal["prefill", "decode"]) -> torch.device:
    if connector != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", 0 if side == "prefill" else 1)  # two ranks cannot share a GPU


# ---- the receiving process


class DecodeSide:
    """Owns the pool that is written, one part of it per pair, and serves rounds until it is told to end."""

    def __init__(self, peer: Connection, connector: str, num_pairs: int, pair_bytes: int, block_bytes: int) -> None:
        self._peer = peer
        self._connector = connector
        num_bytes = num_pairs * pair_bytes
        params = ConnectorParams()
        server: StoreServer | None = None
        if connector == "ipc":
            fd = os.memfd_create("bench-kv-pool", os.MFD_CLOEXEC)
            os.ftruncate(fd, num_bytes)
            pool = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)
            params = ConnectorParams(os.getpid(), fd, num_bytes, num_bytes // block_bytes)
        else:
            pool = torch.zeros(num_bytes, dtype=torch.uint8, device=device_of(connector, "decode"))
            server = StoreServer(HOST)
            params = ConnectorParams(store_host=HOST, store_port=server.port)
        self._parts = pool.view(num_pairs, -1, block_bytes)
        peer.send(params)
        self._blocks = pool.view(-1, block_bytes)
        ready = Countdown(num_pairs)
        self._receivers = [
            load_connector(connector).open_receiver(
                f"pair-{i}",
                HashStore if server is None else partial(server.store, f"pair-{i}"),
                self._blocks,
                HOST,
                ready.done,
            )
            for i in range(num_pairs)
        ]
        ready.wait()
        self._bare = (
            []
            if server is None
            else [RawReceiver(connector, server.store(f"raw-{i}"), part) for i, part in enumerate(self._parts)]
        )

    def serve(self) -> None:
        while (message := self._peer.recv()) is not None:
            self._run(message)

    def _run(self, round_: Round) -> None:
        num_transfers = round_.count * len(self._parts)
        cpu = time.process_time()
        if round_.mode in ("adjacent", "scattered"):
            countdown = Countdown(num_transfers)
            for _ in range(num_transfers):
                announcement = self._peer.recv()
                self._receivers[announcement.pair].receive(announcement.block_ids, countdown.done)
            countdown.wait()
        elif self._connector == "ipc":
            self._peer.recv()  # the sender says when it has written all
        else:
            in_threads([lambda raw=raw: raw.receive(round_.num_blocks, round_.count) for raw in self._bare])  # type: ignore[misc]
        done = RoundDone(time.perf_counter(), time.process_time() - cpu, self._is_correct(round_))
        self._peer.send(done)

    def _is_correct(self, round_: Round) -> bool:
        """Each block begins with its number at the source, in 8 bytes; looked at after the clock has stopped."""
        source = block_ids(round_.mode, round_.num_blocks, "source")
        destination = block_ids(round_.mode, round_.num_blocks, "destination")
        heads = self._parts[:, destination, :8].cpu().view(torch.int64)[..., 0]  # [num_pairs, num_blocks]
        offsets = torch.arange(len(self._parts))[:, None] * self._parts.shape[1]
        correct = torch.equal(heads, torch.tensor(source)[None] + offsets)
        self._parts[:, destination, :8] = 0xFF
        return correct


class RawReceiver(ProcessGroupReceiver):
    """One bare process group: built as the connector builds its own, used without anything around it."""

    def __init__(self, backend: str, store: Any, part: torch.Tensor) -> None:
        ready = Countdown(1)
        super().__init__("raw", backend, lambda: store, HOST, part, ready.done)
        ready.wait()

    def receive(self, num_blocks: int, count: int) -> None:  # type: ignore[override]
        assert self._group is not None
        for _ in range(count):
            self._move(self._group, self._blocks[:num_blocks], TIMEOUT_S)


def decode_side(peer: Connection, connector: str, num_pairs: int, pair_bytes: int, block_bytes: int) -> None:
    torch.set_num_threads(1)
    DecodeSide(peer, connector, num_pairs, pair_bytes, block_bytes).serve()


# ---- the sending process


class PrefillSide:
    """The process that runs the benchmark: owns the source pool, and times the rounds."""

    def __init__(self, peer: Connection, connector: str, num_pairs: int, pair_bytes: int, block_bytes: int) -> None:
        self._peer = peer
        self._connector = connector
        num_bytes = num_pairs * pair_bytes
        pool = torch.full((num_bytes,), 1, dtype=torch.uint8, device=device_of(connector, "prefill"))
        self._blocks = pool.view(-1, block_bytes)
        self._blocks[:, :8] = torch.arange(len(self._blocks))[:, None].view(torch.uint8).to(pool.device)
        self._parts = pool.view(num_pairs, -1, block_bytes)
        params: ConnectorParams = peer.recv()
        ready = Countdown(num_pairs)
        opened_by = load_connector(connector)
        self._writes_alone = opened_by.one_sided
        self._senders = [
            opened_by.open_sender(Peer(f"pair-{i}", params), self._blocks, HOST, ready.done) for i in range(num_pairs)
        ]
        ready.wait()
        self._raw_scattered: list[Callable[[int, int], None]] = []
        if connector == "ipc":
            mapped = map_peer_pool(params).view(num_pairs, -1, block_bytes)
            self._raw: list[Callable[[int, int], None]] = [
                copier(source, destination) for source, destination in zip(self._parts, mapped, strict=True)
            ]
            self._raw_scattered = [
                scattered_copier(source, destination) for source, destination in zip(self._parts, mapped, strict=True)
            ]
        else:
            self._raw = [
                RawSender(connector, connect_store(f"raw-{i}", params), part).send_all
                for i, part in enumerate(self._parts)
            ]

    def run(self, mode: Mode, num_blocks: int, count: int) -> tuple[float, float]:
        """(seconds until all is there and both sides know it, CPU seconds of the receiving process)."""
        self._peer.send(Round(mode, num_blocks, count))
        started = time.perf_counter()
        if mode in ("raw", "raw scattered"):
            jobs = self._raw if mode == "raw" else self._raw_scattered
            in_threads([lambda job=job: job(num_blocks, count) for job in jobs])  # type: ignore[misc]
            if self._connector == "ipc":
                self._peer.send(None)
        else:
            self._ship(mode, num_blocks, count)
        ended = time.perf_counter()
        done: RoundDone = self._peer.recv()
        if not done.correct:
            sys.exit(f"error: {self._connector} delivered other bytes than were sent ({mode}, {num_blocks} blocks)")
        return max(ended, done.at) - started, done.cpu_s

    def _ship(self, mode: Mode, num_blocks: int, count: int) -> None:
        countdown = Countdown(count * len(self._senders))
        source, destination = block_ids(mode, num_blocks, "source"), block_ids(mode, num_blocks, "destination")
        lock = threading.Lock()  # the pipe's
        for _ in range(count):
            for pair, sender in enumerate(self._senders):
                first = pair * self._parts.shape[1]
                dst = [first + i for i in destination]
                announcement = Announcement(pair, dst)

                def done(error: KVTransferFailed | None, announcement: Announcement = announcement) -> None:
                    if error is None and self._writes_alone:
                        with lock:
                            self._peer.send(announcement)
                    countdown.done(error)

                if not self._writes_alone:
                    self._peer.send(announcement)
                sender.send([first + i for i in source], dst, done)
        countdown.wait()


class RawSender(ProcessGroupSender):
    """See RawReceiver."""

    def __init__(self, backend: str, store: Any, part: torch.Tensor) -> None:
        ready = Countdown(1)
        super().__init__("raw", backend, lambda: store, HOST, part, ready.done)
        ready.wait()

    def send_all(self, num_blocks: int, count: int) -> None:
        assert self._group is not None
        for _ in range(count):
            self._move(self._group, self._blocks[:num_blocks], TIMEOUT_S)


def copier(source: torch.Tensor, destination: torch.Tensor) -> Callable[[int, int], None]:
    """memmove, which lets go of the GIL when it is called through ctypes."""

    def copy(num_blocks: int, count: int) -> None:
        for _ in range(count):
            ctypes.memmove(destination.data_ptr(), source.data_ptr(), num_blocks * source.shape[1])

    return copy


def scattered_copier(source: torch.Tensor, destination: torch.Tensor) -> Callable[[int, int], None]:
    """The same, block by block in the order of the scattered transfers."""

    def copy(num_blocks: int, count: int) -> None:
        block_bytes = source.shape[1]
        src = [source.data_ptr() + i * block_bytes for i in block_ids("raw scattered", num_blocks, "source")]
        dst = [destination.data_ptr() + i * block_bytes for i in block_ids("raw scattered", num_blocks, "destination")]
        for _ in range(count):
            for to, from_ in zip(dst, src, strict=True):
                ctypes.memmove(to, from_, block_bytes)

    return copy


# ---- the run


@contextlib.contextmanager
def both_sides(connector: str, num_pairs: int, pair_bytes: int, block_bytes: int) -> Iterator[PrefillSide]:
    """The sending side, connected to a process that receives."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=decode_side, args=(theirs, connector, num_pairs, pair_bytes, block_bytes), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield PrefillSide(ours, connector, num_pairs, pair_bytes, block_bytes)
        ours.send(None)
        process.join(TIMEOUT_S)
    finally:
        process.kill()


def raw_transfer_ms(connector: str, num_bytes: int, num_rounds: int = 15) -> float:
    """What the raw transport takes for one transfer, from one process to another: the median."""
    with both_sides(connector, 1, num_bytes, SMALL_BLOCK_BYTES) as side:
        times = [side.run("raw", num_bytes // SMALL_BLOCK_BYTES, 1)[0] for _ in range(num_rounds + 1)]
    return 1000 * statistics.median(times[1:])  # the first touches the memory for the first time


def measure(connector: str, num_pairs: int, block_bytes: int, sizes: list[int], num_rounds: int) -> list[Figure]:
    with both_sides(connector, num_pairs, max(sizes), block_bytes) as side:
        return [measure_size(side, connector, num_pairs, block_bytes, size, num_rounds) for size in sizes]


def measure_size(
    side: PrefillSide, connector: str, num_pairs: int, block_bytes: int, size: int, num_rounds: int
) -> Figure:
    modes = modes_of(connector)
    num_blocks, count = size // block_bytes, max(1, ROUND_BYTES // size)
    num_bytes = size * count * num_pairs
    rates: dict[Mode, list[float]] = {mode: [] for mode in modes}
    cpu: dict[Mode, list[float]] = {mode: [] for mode in modes}
    for index in range(num_rounds + 1):
        turn = index % len(modes)  # nobody always comes after the same other
        for mode in modes[turn:] + modes[:turn]:
            elapsed_s, cpu_s = side.run(mode, num_blocks, count)
            if index:  # the first round touches the memory for the first time
                rates[mode].append(num_bytes / elapsed_s / 1e9)
                cpu[mode].append(1000 * cpu_s / (num_bytes / 2**30))
    return Figure(
        connector,
        num_pairs,
        block_bytes,
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
            f"{f.connector}, {f.pairs} pair(s), {f.size_bytes // MIB} MiB, {mode} blocks of "
            f"{f.block_bytes // KIB} KiB: rate / {raw_of(f.connector, mode)}",
            ratio,
            AIMS[f.connector],
            "higher",
        )
        for f in figures
        for mode, ratio in f.ratio.items()
        if f.size_bytes >= STEADY_BYTES and (f.block_bytes == BLOCK_BYTES or mode == "adjacent")
    ]


def print_table(figures: list[Figure]) -> None:
    table = Table(
        "connector", "pairs", "KiB", "block KiB", "raw GB/s", "raw scattered", "adjacent", "scattered", "CPU ms/GiB"
    )
    for f in figures:
        rates = {mode: f"{rate:.2f}" for mode, rate in f.gb_per_s.items()}
        rates |= {mode: f"{rates[mode]} ({ratio:.2f})" for mode, ratio in f.ratio.items()}
        table.add_row(
            f.connector,
            str(f.pairs),
            str(f.size_bytes // KIB),
            str(f.block_bytes // KIB),
            rates["raw"],
            rates.get("raw scattered", ""),
            rates["adjacent"],
            rates["scattered"],
            " / ".join(f"{cpu_ms:.0f}" for cpu_ms in f.receiver_cpu_ms_per_gib.values()),
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kv_transfer", description=__doc__)
    parser.add_argument("--connectors", default="", help="comma-separated; default: all that this machine can run")
    add_common_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    able = ["ipc", "gloo"] + (["nccl"] if torch.cuda.device_count() >= 2 else [])
    connectors = options.connectors.split(",") if options.connectors else able
    if unknown := set(connectors) - set(able):
        sys.exit(f"error: cannot run {', '.join(sorted(unknown))} here; use {', '.join(able)} (nccl needs two GPUs)")
    figures = []
    for connector in connectors:
        for num_pairs, block_bytes in itertools.product(PAIR_COUNTS, SIZES):
            sizes = [size for size in SIZES[block_bytes] if not options.quick or size <= STEADY_BYTES]
            figures += measure(connector, num_pairs, block_bytes, sizes, 2 if options.quick else NUM_ROUNDS)
    print_table(figures)
    finish(Report.of("kv_transfer", {"transfers": figures}, aims(figures)), options.json)


if __name__ == "__main__":
    main()
