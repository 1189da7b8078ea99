"""KV transfers between two processes with GPUs: every byte, and the rate relative to a device-to-device copy.

    python -m bench.gpu.kv_transfer [--device cpu] [--quick] [--json FILE]

`ipc` runs on one GPU, and between two if there are two; `nccl` between two GPUs, or between two processes on one GPU
with NCCL 2.30 or newer. Between two, the receiving process sees its own GPU only, as a worker does. Blocks are 2 MiB
(16 tokens of an 8 B model), adjacent or scattered. The sending process makes the reference copy, between the same GPUs.
Each connector runs in separate processes, so a hang or crash affects only its own figures. On CPU, `gloo` takes the
place of `nccl`.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection

import torch

from bench.gpu.part import Part
from tandem.kv_transfer.connector import DataNetwork, Peer
from tandem.kv_transfer.connectors.nccl_group import disable_nccl_watchdog
from tandem.kv_transfer.registry import load_connector
from tandem.runtime.errors import KVTransferFailed
from tests.support.outcomes import Outcomes

HOST = "127.0.0.1"
MIB = 2**20
BLOCK_BYTES = 2 * MIB
SIZES = (16 * MIB, 64 * MIB, 256 * MIB)
MODES = ("adjacent", "scattered")
LIMIT_S = 120.0 if not torch.cuda.is_available() else 25.0
"""Of one connector, and of each wait. Nothing is measured on a CPU, which others may use."""


def block_ids(mode: str, num_blocks: int, side: str) -> list[int]:
    """Returns the block ids; both processes get the same order."""
    ids = list(range(num_blocks))
    if mode == "scattered":
        random.Random(f"{side} {num_blocks}").shuffle(ids)
    return ids


def new_pool(device: torch.device, num_bytes: int) -> torch.Tensor:
    """Returns zeroed blocks, on CPU in a file that a peer can map."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return torch.zeros(num_bytes // BLOCK_BYTES, BLOCK_BYTES, dtype=torch.uint8, device=device)
    fd = os.memfd_create("bench-pool")
    os.ftruncate(fd, num_bytes)
    flat = torch.from_file(f"/proc/{os.getpid()}/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)
    return flat.view(-1, BLOCK_BYTES)


@contextmanager
def only_sees(device: torch.device) -> Iterator[torch.device]:
    """Lets processes that are started see this GPU only; yields their name for it."""
    if device.type == "cpu":
        yield device
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        yield torch.device("cuda", 0)
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def decode_side(peer: Connection, connector: str, device: torch.device, sizes: Sequence[int]) -> None:
    """Receives announced blocks, and returns their checksums when asked to "look"."""
    blocks = new_pool(device, max(sizes))
    outcomes = Outcomes(LIMIT_S)
    receiver = load_connector(connector).open_receiver("pair", blocks, DataNetwork(HOST), peer.send)
    while (announced := peer.recv()) is not None:
        receiver.receive(announced, outcomes)
        outcomes.check_next()
        peer.send("done")
        if peer.recv() == "look":
            peer.send(checksums(blocks, announced))


def checksums(blocks: torch.Tensor, block_ids: list[int]) -> list[bytes]:
    return [hashlib.blake2b(blocks[block_id].cpu().numpy().data, digest_size=8).digest() for block_id in block_ids]


def prefill_side(
    results: Connection, connector: str, devices: tuple[torch.device, torch.device], sizes: Sequence[int],
    num_rounds: int,
) -> None:  # fmt: skip
    """Sends and times all transfers; runs in its own process, so that a device error ends with it."""
    own, peers = devices
    context = multiprocessing.get_context("spawn")
    peer, theirs = context.Pipe()
    with only_sees(peers) if peers != own else nullcontext(peers) as theirs_is:
        process = context.Process(target=decode_side, args=(theirs, connector, theirs_is, sizes), daemon=True)
        process.start()
    theirs.close()
    if not peer.poll(LIMIT_S):
        raise KVTransferFailed("the decode process did not start")
    address = peer.recv()
    source = new_pool(own, max(sizes))
    target = torch.empty_like(source, device=peers)
    outcomes = Outcomes(LIMIT_S)
    is_one_sided = load_connector(connector).one_sided
    sender = load_connector(connector).open_sender(Peer("pair", address), source, DataNetwork(HOST), outcomes)
    outcomes.check_next()
    for size in sizes:
        num_blocks = size // BLOCK_BYTES
        times: dict[str, list[float]] = {mode: [] for mode in ("copy", *MODES)}
        for index in range(num_rounds + 2):
            for mode in MODES:
                src, dst = block_ids(mode, num_blocks, "source"), block_ids(mode, num_blocks, "destination")
                if index == 0:
                    source.random_(0, 256)
                wait_for(own)
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
                if index == 0 and peer.recv() != checksums(source, src):
                    raise KVTransferFailed(f"wrong bytes arrived ({mode} blocks)")
            started = time.perf_counter()
            target[:num_blocks].copy_(source[:num_blocks])
            wait_for(own)
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


def measure(part: Part, connector: str, num_gpus: int, name: str) -> None:
    """Records the figures of each size. Raises RuntimeError."""
    is_cuda = part.device == "cuda"
    first = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    devices = first, torch.device("cuda", 1) if num_gpus == 2 else first
    sizes = SIZES[: 1 if not is_cuda else 2 if part.quick else None]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, connector, devices, sizes, 1 if not is_cuda else 3 if part.quick else 20)
    process = context.Process(target=prefill_side, args=arguments)
    process.start()
    theirs.close()
    deadline = time.monotonic() + LIMIT_S
    try:
        while ours.poll(max(0.0, deadline - time.monotonic())):
            if (result := ours.recv()) is None:
                return
            size, figures = result
            part.add(f"{name}, {size} MiB", figures)
            if size == str(sizes[-1] // MIB):
                for mode in MODES:
                    rates = figures[f"{mode}_gb_per_s"], figures["copy_gb_per_s"]
                    part.compare(f"{name}, {mode} blocks, GB/s", *rates, figures[mode], "copy rate")
        raise RuntimeError(f"not finished within {LIMIT_S:.0f} s")
    except EOFError:
        raise RuntimeError("the sending process ended early; see its output above") from None
    finally:
        process.kill()  # its child ends when the pipe closes
        process.join()


def main() -> None:
    part = Part("kv_transfer", __doc__)
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    disable_nccl_watchdog()
    cases = [("ipc", 0), ("gloo", 0)]
    if part.device == "cuda":
        has_two = torch.cuda.device_count() > 1
        cases = [("ipc", 1), ("ipc", 2), ("nccl", 2)] if has_two else [("ipc", 1), ("nccl", 1)]
    for connector, num_gpus in cases:
        name = f"{connector} between two GPUs" if num_gpus == 2 else connector
        if connector == "nccl" and (problem := why_not_nccl()):
            part.add("nccl", problem)
            continue
        with part.case(f"{name} moves every byte"):
            measure(part, connector, num_gpus, name)
    part.end()


if __name__ == "__main__":
    main()
