"""Blocks of an FP8 pool arrive bit for bit over each connector for CPUs, also between workers of different sizes."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loaded_model import LoadedModel
from tandem.kv_transfer.checksums import combine, rank_checksums
from tandem.kv_transfer.connector import DataNetwork
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.protocol.messages.transfer import KVLayout
from tests.support.outcomes import Addresses, Outcomes

HOST = "127.0.0.1"
NUM_KV_HEADS, NUM_BLOCKS = 4, 20


def pools_of(size: int, stack: ExitStack) -> list[KVPool]:
    """A worker's pools by rank, filled with all bit patterns."""
    layout = KVLayout("model", "float8_e4m3fn", 3, NUM_KV_HEADS // size, 16, 8, size)
    loaded = LoadedModel(None, 64, 10, torch.bfloat16, torch.device("cpu"), layout)
    block_bytes = 3 * 2 * (NUM_KV_HEADS // size) * 8 * 16
    pools = [KVPool(loaded, EngineConfig("m", kv_cache_bytes=NUM_BLOCKS * block_bytes)) for _ in range(size)]
    for pool in pools:
        stack.callback(pool.close)
        assert pool.num_blocks == NUM_BLOCKS and pool.block_bytes == block_bytes
        pool.as_blocks().random_(0, 256)
    return pools


def heads(pools: list[KVPool]) -> torch.Tensor:
    """Bits of all ranks' heads side by side."""
    return torch.cat([pool.tensor.view(torch.uint8) for pool in pools], 3)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (4, 2)], ids=lambda sizes: f"{sizes[0]}-to-{sizes[1]}")
@pytest.mark.parametrize("connector", ["ipc", "tcp", "gloo"])
def test_blocks_of_all_ranks_arrive_bit_for_bit(connector: str, sizes: tuple[int, int]) -> None:
    with ExitStack() as stack:
        prefill, decode = (pools_of(size, stack) for size in sizes)
        senders, receivers = (
            [RankPool(rank, pool.layout, pool.as_blocks(), DataNetwork(HOST)) for rank, pool in enumerate(pools)]
            for pools in (prefill, decode)
        )
        ready, sent, received = Outcomes(), Outcomes(), Outcomes()
        addresses = [Addresses[list[bytes]]() for _ in receivers]
        incoming = [
            rank.open_receiver(connector, "pair", sizes[0], each)
            for rank, each in zip(receivers, addresses, strict=True)
        ]
        peers = [each.get() for each in addresses]
        outgoing = [rank.open_sender(connector, "pair", peers, ready) for rank in senders]
        assert [ready.next() for _ in outgoing] == [None] * sizes[0]
        src, dst = [3, 4, 5, 19, 0], [7, 8, 1, 2, 12]
        expected = heads(decode)
        expected[dst] = heads(prefill)[src]
        if connector != "ipc":
            for receiver in incoming:
                receiver.receive(dst, received)
        for sender in outgoing:
            sender.send(src, dst, sent)
        assert [sent.next() for _ in outgoing] == [None] * sizes[0]
        if connector != "ipc":
            assert [received.next() for _ in incoming] == [None] * sizes[1]
        assert torch.equal(heads(decode), expected)
        sums = [
            combine([rank_checksums(rank.blocks, ids, rank.layout, rank.rank) for rank in ranks])
            for ranks, ids in ((senders, src), (receivers, dst))
        ]
        assert sums[0] == sums[1]
        closed = Outcomes()
        for sender in outgoing:
            sender.close(lambda: closed(None))
        assert [closed.next() for _ in outgoing] == [None] * sizes[0]
        for receiver in incoming:
            receiver.close()
