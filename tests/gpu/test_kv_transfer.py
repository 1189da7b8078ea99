"""KV transfer between two processes on one GPU: CUDA IPC, and NCCL if it lets two ranks share a device."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
import torch

from tandem.kv_transfer.connector import DataNetwork, Peer
from tandem.kv_transfer.connectors.cuda_ipc import CudaPoolHandle, map_peer_pool
from tandem.kv_transfer.connectors.cuda_stream import SideStream
from tandem.kv_transfer.connectors.nccl_group import NCCL_ENVIRONMENT
from tandem.kv_transfer.registry import load_connector
from tandem.runtime.errors import KVTransferFailed
from tests.support.outcomes import Outcomes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")

NUM_BLOCKS, BLOCK_BYTES = 64, 1 << 16
NETWORK = DataNetwork("127.0.0.1")
NUM_STREAMS = 24
"""Fewer than the hardware queues that workers ask for (`deploy.processes.gpu_environment`): streams of one queue wait
for each other. With the 8 queues that CUDA has by default, forty streams did on an H200."""


@pytest.mark.skipif(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "32", reason="set CUDA_DEVICE_MAX_CONNECTIONS=32")
def test_side_streams_wait_neither_for_each_other_nor_for_the_default_stream() -> None:
    device = torch.device("cuda", 0)
    streams = [SideStream(device) for _ in range(NUM_STREAMS)]
    matrix, cells = torch.randn(8192, 8192, device=device), torch.zeros(len(streams), device=device)
    product = torch.mm(matrix, matrix)
    cells += 1
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]._stream):
        for _ in range(1000):  # more than a second long
            torch.mm(matrix, matrix, out=product)
    busy = streams[0].mark()
    for cell, stream in zip(cells[1:].unbind(), streams[1:], strict=True):
        stream.run(lambda cell=cell: cell.add_(1))
    cells[0].add_(1)
    torch.cuda.current_stream().synchronize()
    assert not busy.query(), "all others have ended before"
    streams[0].run(lambda: None)
    assert cells.tolist() == [2.0] * len(streams)


def decode_side(peer: Connection, connector: str) -> None:
    """Sends its address, receives blocks on command, returns the pool, and ends on command."""
    blocks = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8, device="cuda")
    outcomes = Outcomes(60)
    receiver = load_connector(connector).open_receiver("pair", blocks, NETWORK, peer.send)
    while (block_ids := peer.recv()) is not None:
        receiver.receive(block_ids, outcomes)
        peer.send((outcomes.next(), blocks.cpu()))


@contextmanager
def decode_process(connector: str) -> Iterator[tuple[Connection, bytes]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=decode_side, args=(theirs, connector), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(60), "the decode process did not start"
        yield ours, ours.recv()
        ours.send(None)
        process.join(20)
    finally:
        process.kill()
        process.join()


def random_blocks() -> torch.Tensor:
    return torch.randint(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device="cuda")


def move_at_random(connector: str, sender: Any, peer: Connection, source: torch.Tensor) -> None:
    rng, expected = random.Random(0), torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    for _ in range(10):
        count = rng.randint(1, 20)
        start = rng.randrange(NUM_BLOCKS - count)
        src = rng.sample(range(NUM_BLOCKS), count) if rng.random() < 0.5 else list(range(start, start + count))
        dst = rng.sample(range(NUM_BLOCKS), count) if rng.random() < 0.5 else list(range(start, start + count))
        source.random_(0, 256)  # computed on the model's stream, just before
        sent = Outcomes(60)
        if not load_connector(connector).one_sided:
            peer.send(dst)
            sender.send(src, dst, sent)
            assert sent.next() is None
        else:
            sender.send(src, dst, sent)
            assert sent.next() is None
            peer.send(dst)
        expected[dst] = source.cpu()[src]
        assert peer.poll(60)
        error, arrived = peer.recv()
        assert error is None
        assert torch.equal(arrived, expected)


def test_cuda_ipc_puts_blocks_where_they_should_be() -> None:
    with decode_process("ipc") as (peer, address):
        ready, source = Outcomes(60), random_blocks()
        sender = load_connector("ipc").open_sender(Peer("pair", address), source, NETWORK, ready)
        assert ready.next() is None
        move_at_random("ipc", sender, peer, source)
        closed, late = Outcomes(60), Outcomes()
        sender.close(lambda: closed(None))
        closed.next()
        sender.send([0], [0], late)
        error = late.next()
        assert error is not None and "closed" in error.message


def prefill_side(results: Connection, address: bytes) -> None:
    """Sends a few blocks over `ipc`; ends on command."""
    ready, source = Outcomes(60), torch.full((NUM_BLOCKS, BLOCK_BYTES), 7, dtype=torch.uint8, device="cuda")
    sender = load_connector("ipc").open_sender(Peer("pair", address), source, NETWORK, ready)
    error, sent = ready.next(), Outcomes(60)
    if error is None:
        sender.send([1, 2, 9], [8, 3, 4], sent)
        error = sent.next()
    results.send(None if error is None else error.message)
    results.recv()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("own", [0, 1])
def test_cuda_ipc_between_gpus_that_do_not_see_each_other(own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has one GPU, which is its number 0, as workers of a cluster have."""
    gpus = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in (own, 1 - own)]
    reaches = torch.cuda.can_device_access_peer(own, 1 - own)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus[1])
    with decode_process("ipc") as (peer, address):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus[0])
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=prefill_side, args=(theirs, address), daemon=True)
        process.start()
        theirs.close()
        try:
            assert ours.poll(60), "the prefill process did not start"
            if (error := ours.recv()) is None:
                peer.send([8, 3, 4])
                assert peer.poll(60)
                _, arrived = peer.recv()
                assert arrived[[8, 3, 4]].eq(7).all() and arrived.sum() == 3 * 7 * BLOCK_BYTES
            else:
                assert not reaches and "cannot map" in error, error
            ours.send(None)
            process.join(20)
        finally:
            process.kill()
            process.join()


def test_a_second_pair_maps_the_same_pool_again() -> None:
    with decode_process("ipc") as (peer, address):
        for _ in range(3):
            ready, closed, source = Outcomes(60), Outcomes(), random_blocks()
            sender = load_connector("ipc").open_sender(Peer("pair", address), source, NETWORK, ready)
            assert ready.next() is None
            sent = Outcomes(60)
            sender.send([1], [2], sent)
            assert sent.next() is None
            peer.send([2])
            _, arrived = peer.recv()
            assert torch.equal(arrived[2], source[1].cpu())
            sender.close(lambda closed=closed: closed(None))
            closed.next()


def test_an_invalid_handle_is_refused() -> None:
    handle = CudaPoolHandle(b"c" + bytes(64), NUM_BLOCKS * BLOCK_BYTES, 0, b"", 0, NUM_BLOCKS)
    with pytest.raises(KVTransferFailed, match="cannot map"):
        map_peer_pool(msgspec.msgpack.encode(handle), torch.device("cuda", 0))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.nccl.version() < (2, 30),
    reason="NCCL before 2.30 wants a GPU per rank",
)
def test_nccl_between_two_processes_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NCCL_MULTI_RANK_GPU_ENABLE": "1", **NCCL_ENVIRONMENT}.items():
        monkeypatch.setenv(name, value)
    with decode_process("nccl") as (peer, address):
        ready, source = Outcomes(60), random_blocks()
        sender = load_connector("nccl").open_sender(Peer("pair", address), source, NETWORK, ready)
        assert ready.next() is None
        move_at_random("nccl", sender, peer, source)
        sender.close(lambda: None)
