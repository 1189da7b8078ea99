"""Throughput of KV transfers between two processes with GPUs, relative to a device-to-device copy in the same run.

    python -m bench.gpu.kv_transfer [--quick] [--json FILE]

`ipc` runs on one GPU; `nccl` between two GPUs, or between two processes on one GPU with NCCL 2.30 or newer. Blocks are
2 MiB (16 tokens of an 8 B model), adjacent or scattered. The sending process makes the reference copy, between the GPUs
if there are two. Each connector runs in separate processes, so a hang or crash affects only its own figures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import random
import statistics
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import HashStore

from bench.support.report import Aim, Report, add_common_options, finish
from tandem.kv_transfer.connector import Peer
from tandem.kv_transfer.connectors.process_group import StoreServer
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.kv_transfer.registry import load_connector
from tandem.protocol.messages.transfer import ConnectorParams, KVLayout
from tandem.runtime.errors import KVTransferFailed

HOST = "127.0.0.1"
MIB = 2**20
BLOCK_BYTES = 2 * MIB
SIZES = (16 * MIB, 64 * MIB, 256 * MIB)
LAYOUT = KVLayout("model", "bfloat16", 32, 8, 128, 16)  # blocks of BLOCK_BYTES
MODES = ("adjacent", "scattered")
AIM = 0.8
LIMIT_S = 45.0


class Outcomes:
    """Callback that queues the outcome of each transfer."""

    def __init__(self) -> None:
        self._queue: queue.Queue[KVTransferFailed | None] = queue.Queue()

    def __call__(self, error: KVTransferFailed | None) -> None:
        self._queue.put(error)

    def check_next(self) -> None:
        error = self._queue.get(timeout=LIMIT_S)
        if error is not None:
            raise error


def block_ids(mode: str, num_blocks: int, side: str) -> list[int]:
    """Returns the block ids; both processes get the same order."""
    ids = list(range(num_blocks))
    if mode == "scattered":
        random.Random(f"{side} {num_blocks}").shuffle(ids)
    return ids


def decode_side(peer: Connection, connector: str, device_index: int) -> None:
    """Receives announced blocks, and returns the first byte of each when asked to "look"."""
    torch.cuda.set_device(device_index)
    blocks = torch.zeros(max(SIZES) // BLOCK_BYTES, BLOCK_BYTES, dtype=torch.uint8, device=f"cuda:{device_index}")
    outcomes, server = Outcomes(), None
    params = ConnectorParams(os.getpid(), 0, blocks.nbytes, len(blocks))
    if connector == "ipc":
        params = RankPool(0, LAYOUT, blocks, HOST).located(params)
    else:
        server = StoreServer(HOST)
        params = ConnectorParams(store_host=HOST, store_port=server.port)
    peer.send(params)
    open_store = HashStore if server is None else partial(server.store, "pair")
    receiver = load_connector(connector).open_receiver("pair", open_store, blocks, HOST, outcomes)
    outcomes.check_next()
    while (announced := peer.recv()) is not None:
        receiver.receive(announced, outcomes)
        outcomes.check_next()
        peer.send("done")
        if peer.recv() == "look":
            peer.send(blocks[announced, 0].cpu())


def prefill_side(results: Connection, connector: str, device_index: int, num_rounds: int) -> None:
    """Sends and times all transfers; runs in its own process, so that a device error ends with it."""
    torch.cuda.set_device(0)
    context = multiprocessing.get_context("spawn")
    peer, theirs = context.Pipe()
    process = context.Process(target=decode_side, args=(theirs, connector, device_index), daemon=True)
    process.start()
    theirs.close()
    if not peer.poll(LIMIT_S):
        raise KVTransferFailed("the decode process did not start")
    params = peer.recv()
    source = torch.zeros(max(SIZES) // BLOCK_BYTES, BLOCK_BYTES, dtype=torch.uint8, device="cuda:0")
    source[:] = torch.arange(len(source), device="cuda:0", dtype=torch.uint8)[:, None]
    target = torch.empty_like(source, device=f"cuda:{device_index}")
    outcomes = Outcomes()
    is_one_sided = load_connector(connector).one_sided
    sender = load_connector(connector).open_sender(Peer("pair", params), source, HOST, outcomes)
    outcomes.check_next()
    for size in SIZES:
        num_blocks = size // BLOCK_BYTES
        times: dict[str, list[float]] = {mode: [] for mode in ("copy", *MODES)}
        for index in range(num_rounds + 2):
            for mode in MODES:
                src, dst = block_ids(mode, num_blocks, "source"), block_ids(mode, num_blocks, "destination")
                torch.cuda.synchronize()
                started = time.perf_counter()
                if not is_one_sided:
                    peer.send(dst)
                sender.send(src, dst, outcomes)
                outcomes.check_next()
                if is_one_sided:
                    peer.send(dst)
                if not peer.poll(LIMIT_S) or peer.recv() != "done":
                    raise KVTransferFailed("the decode process did not receive the blocks")
                times[mode].append(time.perf_counter() - started)
                peer.send("look" if index == 0 else "go on")
                if index == 0 and not torch.equal(peer.recv(), source[src, 0].cpu()):
                    raise KVTransferFailed(f"wrong bytes arrived ({mode} blocks)")
            started = time.perf_counter()
            target[:num_blocks].copy_(source[:num_blocks])
            torch.cuda.synchronize()
            times["copy"].append(time.perf_counter() - started)
        seconds = {mode: statistics.median(values[2:]) for mode, values in times.items()}
        figures = {f"{mode}_gb_per_s": size / s / 1e9 for mode, s in seconds.items()}
        results.send((str(size // MIB), figures | {mode: seconds["copy"] / seconds[mode] for mode in MODES}))
    peer.send(None)
    process.join(10)
    results.send(None)


def why_not_nccl() -> str | None:
    if torch.cuda.device_count() > 1 or (nccl := torch.cuda.nccl.version()) >= (2, 30):  # type: ignore[no-untyped-call]
        return None
    version = ".".join(map(str, nccl))
    return f"skipped: one GPU, and NCCL {version} needs to be 2.30 or newer to run two ranks on it"


def measure(connector: str, num_rounds: int) -> dict[str, Any]:
    """Returns the figures by MiB, and under "problem" what failed."""
    second = connector == "nccl" and torch.cuda.device_count() > 1
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=prefill_side, args=(theirs, connector, int(second), num_rounds))
    process.start()
    theirs.close()
    figures: dict[str, Any] = {"devices": 2 if second else 1, "sizes": {}}
    deadline = time.monotonic() + LIMIT_S
    try:
        while ours.poll(max(0.0, deadline - time.monotonic())):
            if (result := ours.recv()) is None:
                return figures
            figures["sizes"][result[0]] = result[1]
        figures["problem"] = f"not finished within {LIMIT_S:.0f} s"
    except EOFError:
        figures["problem"] = "the sending process ended early; see its output above"
    finally:
        process.kill()  # its child ends when the pipe closes
        process.join()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.kv_transfer", description=__doc__)
    add_common_options(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, but none is visible")
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    figures: dict[str, Any] = {"ipc": measure("ipc", 5 if options.quick else 20)}
    problem = why_not_nccl()
    figures["nccl"] = {"problem": problem} if problem else measure("nccl", 5 if options.quick else 20)
    table = Table("connector", "MiB", "copy GB/s", "adjacent / copy", "scattered / copy")
    aims = []
    for connector, found in figures.items():
        if "problem" in found:
            Console().print(f"{connector}: {found['problem']}")
        for size, f in found.get("sizes", {}).items():
            table.add_row(connector, size, f"{f['copy_gb_per_s']:.0f}", *(f"{f[mode]:.2f}" for mode in MODES))
            aims += [
                Aim.of(f"{connector}, {size} MiB, {mode} blocks: rate / copy", f[mode], AIM, "higher") for mode in MODES
            ]
    Console().print(table)
    finish(Report.of("gpu.kv_transfer", figures, aims), options.json)


if __name__ == "__main__":
    main()
