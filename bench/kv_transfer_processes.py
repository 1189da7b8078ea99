"""The two processes of `bench.kv_transfer`: one owns the source pool and the clock, the other the destination pool."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from bench.kv_transfer_references import (
    HOST,
    ONE_SIDED,
    RAW,
    TIMEOUT_S,
    Copy,
    Mode,
    NixlReference,
    block_ids,
    raw_ipc,
)
from tandem.kv_transfer.connector import DataNetwork, KVConnector, Peer
from tandem.kv_transfer.connectors.mapped_memory import map_peer_pool
from tandem.kv_transfer.registry import load_connector
from tandem.protocol.network_keys import load_keys, make_keys
from tandem.protocol.tls_identity import tls_contexts
from tandem.runtime.errors import KVTransferFailed

BLOCK_BYTES = 1 << 20


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


def opened_by(connector: str, store: Path) -> tuple[KVConnector, DataNetwork]:
    """Returns the connector and its network. "tls" is the connector `tcp` with keys, in a folder beside the store."""
    if connector != "tls":
        return load_connector(connector), DataNetwork(HOST)
    return load_connector("tcp"), DataNetwork(HOST, tls_contexts(load_keys(keys_beside(store), "worker")))


def keys_beside(store: Path) -> Path:
    return store.parent / "keys"


class DecodeSide:
    """Receiving process: owns the destination pool, one share per pair, and runs rounds until it gets None."""

    def __init__(self, peer: Connection, connector: str, num_pairs: int, pair_bytes: int, store: Path) -> None:
        torch.set_num_threads(1)
        self._peer = peer
        num_bytes = num_pairs * pair_bytes
        if connector == "ipc":
            fd = os.memfd_create("bench-kv-pool", os.MFD_CLOEXEC)
            os.ftruncate(fd, num_bytes)
            pool = torch.from_file(f"/proc/{os.getpid()}/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)
        else:
            pool = torch.zeros(num_bytes, dtype=torch.uint8)
        self._shares = pool.view(num_pairs, -1, BLOCK_BYTES)
        made_by, network = opened_by(connector, store)
        blocks = pool.view(-1, BLOCK_BYTES)
        self._receivers = []
        for i in range(num_pairs):
            addresses: queue.Queue[bytes | KVTransferFailed] = queue.Queue()
            self._receivers.append(made_by.open_receiver(f"pair-{i}", blocks, network, addresses.put))
            peer.send(addresses.get(timeout=TIMEOUT_S))
        self._raw = [RAW[connector](store, i, 1, share) for i, share in enumerate(self._shares) if connector in RAW]
        self._nixl = NixlReference(store, 1, self._shares) if connector == "nixl" else None

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
        addresses = [peer.recv() for _ in range(num_pairs)]
        ready = Countdown(num_pairs)
        made_by, network = opened_by(connector, store)
        self._is_one_sided = made_by.one_sided
        self._senders = [
            made_by.open_sender(Peer(f"pair-{i}", address), blocks, network, ready.done)
            for i, address in enumerate(addresses)
        ]
        ready.wait()
        self._raw: dict[Mode, list[Copy]] = {}
        modes: tuple[Mode, ...] = ("raw", "raw scattered")
        if connector == "ipc":
            mapped = map_peer_pool(addresses[0]).view(num_pairs, -1, BLOCK_BYTES)
            for mode in modes:
                self._raw[mode] = [raw_ipc(a, b, mode) for a, b in zip(self._shares, mapped, strict=True)]
        elif connector == "nixl":
            reference = NixlReference(store, 0, self._shares)
            for mode in modes:
                self._raw[mode] = [reference.writes_of(pair, mode) for pair in range(num_pairs)]
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
            if self._connector in ONE_SIDED:
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
