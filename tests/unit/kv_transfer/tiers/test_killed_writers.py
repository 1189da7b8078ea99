"""Workers that are killed while they store: the next one finds whole blocks only."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.kv_transfer.tiers.disk import DiskTier
from tandem.kv_transfer.tiers.host_memory import HostMemoryTier
from tandem.kv_transfer.tiers.tier import KVTier
from tests.unit.kv_transfer.tiers.stored_blocks import IDENTITY, content_of

BLOCK_BYTES = 1 << 20
MAX_BYTES = 10 << 20
WRITER = """
import sys
from hashlib import shake_128
from os import urandom
from tandem.kv_transfer.tiers.disk import DiskTier
from tandem.kv_transfer.tiers.host_memory import HostMemoryTier

kind, path, identity, max_bytes, block_bytes = sys.argv[1:]
tier = {"host": HostMemoryTier, "disk": DiskTier}[kind](path, int(max_bytes), identity.encode(), int(block_bytes))
tier.open()
blocks = [(name, memoryview(shake_128(name).digest(int(block_bytes)))) for name in (urandom(16) for _ in range(20))]
tier.store(*blocks[0])
print("storing", flush=True)
while True:
    for name, block in blocks:
        tier.store(name, block)
"""


@pytest.fixture(params=["host", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    if request.param == "disk":
        yield "disk", str(tmp_path)
        return
    fd = os.memfd_create("test-killed-writer")
    yield "host", f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


def test_only_whole_blocks_are_found_after_a_kill(place: tuple[str, str]) -> None:
    kind, path = place
    make: Callable[[str, int, bytes, int], KVTier] = HostMemoryTier if kind == "host" else DiskTier
    rng = random.Random(0)
    for _ in range(4):
        command = [sys.executable, "-c", WRITER, kind, path, IDENTITY.decode(), str(MAX_BYTES), str(BLOCK_BYTES)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"storing\n"
            time.sleep(rng.uniform(0.02, 0.1))
            writer.kill()
        tier = make(path, MAX_BYTES, IDENTITY, BLOCK_BYTES)
        tier.open()
        found = tier.changes.take().added
        assert found
        block = memoryview(bytearray(BLOCK_BYTES))
        for block_hash in found:
            assert tier.load(block_hash, block) and block == content_of(block_hash, BLOCK_BYTES)
        assert tier.num_corrupt == 0
        tier.close()
