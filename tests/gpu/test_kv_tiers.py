"""KV blocks between a GPU's pool and the tiers below it: pinned host memory, and disk through a pinned buffer."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import pytest
import torch

from tandem.kv_transfer.tiers.registry import make_tiers
from tandem.kv_transfer.tiers.tier import TierAnswer, TiersConfig
from tandem.kv_transfer.tiers.tier_thread import PinnedCopies, StagedCopies, TierThread, copies_between
from tandem.protocol.messages.transfer import KVLayout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")

NUM_BLOCKS, BLOCK_BYTES = 32, 1 << 20
LAYOUT = KVLayout("model", "bfloat16", 2, 4, 64, 32)
HASHES = [blake2b(bytes([number]), digest_size=16).digest() for number in range(NUM_BLOCKS)]


@pytest.fixture
def config(tmp_path: Path) -> Iterator[TiersConfig]:
    fd = os.memfd_create("test-gpu-tier")
    yield TiersConfig(1 / 16, str(tmp_path / "tier"), 1 / 16, host_files=[f"/proc/{os.getpid()}/fd/{fd}"])
    os.close(fd)


@pytest.mark.parametrize("name", ["host", "disk"])
def test_blocks_come_back_as_they_were_also_to_another_worker(name: str, config: TiersConfig) -> None:
    blocks = torch.randint(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device="cuda")
    expected = blocks.cpu()
    for is_restarted in (False, True):
        tiers = make_tiers(config, LAYOUT, 0, blocks)
        host, disk = (copies_between(blocks, tier) for tier in tiers)
        assert isinstance(host, PinnedCopies) and isinstance(disk, StagedCopies)
        [tier] = [each for each in tiers if each.name == name]
        thread, answers = TierThread(blocks, tier), queue.Queue[TierAnswer]()
        if not is_restarted:
            thread.store(range(NUM_BLOCKS), HASHES, answers.put)
            stored = answers.get(timeout=30)
            assert stored.error is None and stored.num_blocks == NUM_BLOCKS
        blocks.zero_()
        torch.cuda.synchronize()
        turned = list(reversed(range(NUM_BLOCKS)))
        thread.load(turned, HASHES, answers.put)
        loaded = answers.get(timeout=30)
        assert loaded.error is None and loaded.num_blocks == NUM_BLOCKS and loaded.num_corrupt == 0
        assert torch.equal(blocks[turned].cpu(), expected)
        thread.close()
