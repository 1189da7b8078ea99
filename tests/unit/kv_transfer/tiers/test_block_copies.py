"""Copies between a pool on a GPU and tiers: each copy is complete before its bytes are used. Pinning the host's memory.

The device runs queued copies as late as it may. `tests/gpu/test_kv_tiers.py` runs the same with a real one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.kv_transfer.connectors import cuda_stream
from tandem.kv_transfer.connectors.cuda_stream import SideStream
from tandem.kv_transfer.tiers.disk import DiskTier
from tandem.kv_transfer.tiers.host_memory import HostMemoryTier, Pin
from tandem.kv_transfer.tiers.registry import make_tiers
from tandem.kv_transfer.tiers.tier import KVTier, TierFailed, TiersConfig
from tandem.kv_transfer.tiers.tier_thread import (
    BlockCopies,
    DirectCopies,
    PinnedCopies,
    StagedCopies,
    copies_between,
)
from tandem.protocol.messages.transfer import KVLayout
from tests.support.late_device import LateDevice, install
from tests.unit.kv_transfer.tiers.stored_blocks import (
    BLOCK_BYTES,
    DISK_RECORD_BYTES,
    IDENTITY,
    get,
    hash_of,
    held,
    host_bytes,
)
from tests.unit.kv_transfer.tiers.stored_blocks import content_of as bytes_of

NUM_BLOCKS = 6
ON_A_GPU = SimpleNamespace(device=torch.device("cuda", 0), shape=(NUM_BLOCKS, BLOCK_BYTES))
LAYOUT = KVLayout("model", "bfloat16", 2, 4, 64, 32)


def content_of(number: int) -> torch.Tensor:
    return torch.tensor(list(bytes_of(hash_of(number))), dtype=torch.uint8)


class Pinned:
    """A `Pin` that remembers what it has pinned."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> Callable[[], None]:
        self.sizes.append(memory.nbytes)
        return lambda: self.sizes.remove(memory.nbytes)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test-copies")
    yield fd
    os.close(fd)


def host_tier(fd: int, pin: Pin | None = None, num_blocks: int = NUM_BLOCKS) -> HostMemoryTier:
    tier = HostMemoryTier(f"/proc/{os.getpid()}/fd/{fd}", host_bytes(num_blocks), IDENTITY, BLOCK_BYTES, pin)
    tier.open()
    return tier


def copies_of(kind: str, blocks: torch.Tensor, fd: int, folder: Path) -> tuple[BlockCopies, KVTier]:
    tier: KVTier
    if kind == "pinned":
        pinned = host_tier(fd, Pinned())
        return PinnedCopies(blocks, pinned), pinned
    if kind == "staged, host":
        tier = host_tier(fd)
    else:
        tier = DiskTier(str(folder), NUM_BLOCKS * DISK_RECORD_BYTES, IDENTITY, BLOCK_BYTES)
        tier.open()
    staged = StagedCopies(blocks, tier)
    staged._staging = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)  # pinned memory needs a GPU
    return staged, tier


def arrive_whole(kind: str, seed: int, fd: int, folder: Path) -> bool:
    """Stores three blocks and loads them into others, with everything in between as late as possible."""
    with pytest.MonkeyPatch.context() as patch:
        device = LateDevice(seed)
        install(device, patch)
        is_whole: list[bool] = []

        def serve() -> None:
            blocks = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
            copies, tier = copies_of(kind, blocks, fd, folder)
            tier.clear()
            for number in (1, 2, 3):
                blocks[number] = content_of(number)
                copies.store(number, hash_of(number))
                blocks[number] = 0xAA  # another request's
            for number in (1, 2, 3):
                found = copies.load(number - 1, hash_of(number))
                is_whole.append(found and torch.equal(blocks[number - 1], content_of(number)))
            assert not copies.load(4, hash_of(4))
            tier.close()

        device.start("tier", serve, is_daemon=False)
        device.run()
    return all(is_whole)


@pytest.mark.parametrize("kind", ["pinned", "staged, host", "staged, disk"])
def test_blocks_of_a_gpu_arrive_whole(kind: str, fd: int, tmp_path: Path) -> None:
    assert all(arrive_whole(kind, seed, fd, tmp_path / "tier") for seed in range(20))


@pytest.mark.parametrize("kind", ["pinned", "staged, host", "staged, disk"])
def test_copies_that_nobody_waits_for_are_noticed(
    kind: str, fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: SideStream, job: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            job()

    monkeypatch.setattr(SideStream, "run", run)
    assert not all(arrive_whole(kind, seed, fd, tmp_path / "tier") for seed in range(20))


def test_a_damaged_block_in_pinned_memory_is_not_loaded(fd: int) -> None:
    tier = host_tier(fd, Pinned())
    tier.store(hash_of(1), bytes_of(hash_of(1)))
    place = os.pread(fd, os.fstat(fd).st_size, 0).index(bytes(bytes_of(hash_of(1))))
    os.pwrite(fd, b"\xee\xee", place)
    assert not PinnedCopies(torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8), tier).load(0, hash_of(1))
    assert tier.num_corrupt == 1 and held(tier, 1) == []


def test_a_copy_that_fails_leaves_the_tier_as_it_was(fd: int) -> None:
    tier = host_tier(fd, Pinned(), num_blocks=2)
    for number in (1, 2):
        tier.store(hash_of(number), bytes_of(hash_of(number)))
    assert tier.room_for(hash_of(3)) is not None  # evicts the oldest; then the copy fails
    assert held(tier, 1, 2, 3) == [2]
    tier.store(hash_of(4), bytes_of(hash_of(4)))
    assert get(tier, 4) and get(tier, 2)
    assert tier.room_for(hash_of(4)) is None, "it is there"


def test_memory_that_could_not_be_pinned_is_not_pinned_again(fd: int) -> None:
    tried: list[int] = []

    def pin(memory: Any) -> Callable[[], None]:
        tried.append(memory.nbytes)
        raise TierFailed("cannot pin")

    tier = HostMemoryTier(f"/proc/{os.getpid()}/fd/{fd}", host_bytes(NUM_BLOCKS), IDENTITY, BLOCK_BYTES, pin)
    for _ in range(3):  # a tier is opened again by each job
        with pytest.raises(TierFailed, match="cannot pin"):
            tier.open()
    assert len(tried) == 1


def test_the_memory_is_pinned_from_open_to_close(fd: int) -> None:
    pinned = Pinned()
    tier = host_tier(fd, pinned)
    assert pinned.sizes == [host_bytes(NUM_BLOCKS)] and tier.is_pinned
    tier.close()
    assert pinned.sizes == []
    tier.close()


class Runtime:
    """In place of the CUDA runtime library. result: of each call."""

    def __init__(self, result: int) -> None:
        self.result = result
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.registered[address] = num_bytes
        return self.result

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return self.result


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime(0)
    install(LateDevice(0), monkeypatch)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_pinning_registers_the_whole_mapping_with_cuda(runtime: Runtime) -> None:
    memory = np.zeros(8192, np.uint8)
    undo = cuda_stream.pin(memory, torch.device("cuda", 0))
    assert runtime.registered == {memory.ctypes.data: 8192}
    undo()
    assert runtime.registered == {}


def test_only_the_host_memory_of_a_gpu_is_pinned(runtime: Runtime, fd: int, tmp_path: Path) -> None:
    config = TiersConfig(
        host_bytes(4) / 2**30, str(tmp_path / "tier"), 4 * DISK_RECORD_BYTES / 2**30,
        host_files=[f"/proc/{os.getpid()}/fd/{fd}"],
    )  # fmt: skip
    blocks: Any = ON_A_GPU
    host, disk = make_tiers(config, LAYOUT, 0, blocks)
    host.open()
    assert list(runtime.registered.values()) == [host_bytes(4)]
    assert isinstance(copies_between(blocks, host), PinnedCopies)
    assert isinstance(copies_between(blocks, disk), StagedCopies)
    host.close()
    assert runtime.registered == {}
    on_cpu = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    host, _ = make_tiers(config, LAYOUT, 0, on_cpu)
    host.open()
    assert runtime.registered == {} and isinstance(copies_between(on_cpu, host), DirectCopies)


def test_memory_that_cannot_be_pinned_fails_the_tier_with_a_reason(
    runtime: Runtime, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(result: int) -> None:
        raise torch.cuda.CudaError(result)

    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    monkeypatch.setattr(torch.cuda, "CudaError", type("CudaError", (RuntimeError,), {}))
    config = TiersConfig(host_bytes(4) / 2**30, host_files=[f"/proc/{os.getpid()}/fd/{fd}"])
    blocks: Any = ON_A_GPU
    (tier,) = make_tiers(config, LAYOUT, 0, blocks)
    with pytest.raises(TierFailed, match=r"cannot pin .* GiB of host memory for cuda:0: .*give --kv-host-gib less"):
        tier.open()
