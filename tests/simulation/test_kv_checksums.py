"""Checksums of KV blocks: equal for equal content on any number of ranks; corruption is detected."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.decode_worker.decode_scheduler import DecodeScheduler
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.handover.actions import Receive, SendToPeer, SendToProxy
from tandem.kv_transfer.checksums import combine, corrupt_blocks, rank_checksums
from tandem.protocol.messages.dispatch import AttemptFailed, PrepareDecode
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.protocol.messages.transfer import KVLayout, KVRefused, ReserveKV, ShipKV
from tandem.runtime.errors import KVTransferFailed

NUM_BLOCKS, NUM_HEADS, HEAD_BYTES = 6, 6, 16
LAYOUT = KVLayout("model", "bfloat16", 2, NUM_HEADS, 2, 4)
RNG = torch.Generator().manual_seed(0)
BLOCKS = torch.randint(0, 256, (NUM_BLOCKS, 4, NUM_HEADS, HEAD_BYTES), dtype=torch.uint8, generator=RNG)


def checksums(blocks: torch.Tensor, block_ids: list[int], num_ranks: int = 1) -> list[int]:
    """blocks: all heads, [num_blocks, 4, NUM_HEADS, HEAD_BYTES]; each rank has its own copy of its share."""
    num_heads = NUM_HEADS // num_ranks
    layout = msgspec.structs.replace(LAYOUT, num_kv_heads=num_heads, tensor_parallel_size=num_ranks)
    shares = [blocks[:, :, r * num_heads : (r + 1) * num_heads].reshape(len(blocks), -1) for r in range(num_ranks)]
    return combine([rank_checksums(share, block_ids, layout, rank) for rank, share in enumerate(shares)])


@pytest.mark.parametrize("num_ranks", [2, 3, 6])
def test_checksums_do_not_depend_on_the_number_of_ranks(num_ranks: int) -> None:
    assert checksums(BLOCKS, [4, 1], num_ranks) == checksums(BLOCKS, [4, 1])


@given(st.integers(0, NUM_BLOCKS - 1), st.integers(0, BLOCKS[0].numel() - 1), st.integers(1, 255))
def test_one_changed_byte_changes_the_checksum(block_id: int, at: int, change: int) -> None:
    changed = BLOCKS.clone()
    changed[block_id].view(-1)[at] ^= change
    everything = list(range(NUM_BLOCKS))
    assert corrupt_blocks(everything, checksums(BLOCKS, everything), checksums(changed, everything)) == [block_id]


def test_swapped_heads_change_the_checksum() -> None:
    swapped = BLOCKS.clone()
    swapped[:, :, [0, 1]] = BLOCKS[:, :, [1, 0]]
    assert all(a != b for a, b in zip(checksums(BLOCKS, [0, 1]), checksums(swapped, [0, 1]), strict=True))
    swapped = BLOCKS[:, [1, 0, 2, 3]]
    assert all(a != b for a, b in zip(checksums(BLOCKS, [0, 1]), checksums(swapped, [0, 1]), strict=True))


BLOCK_IDS = range(NUM_BLOCKS)


@given(st.permutations(BLOCK_IDS), st.permutations(BLOCK_IDS), st.sets(st.sampled_from(BLOCK_IDS)))
def test_exactly_the_corrupt_blocks_are_detected(src: list[int], dst: list[int], corrupt: set[int]) -> None:
    target = torch.zeros_like(BLOCKS)
    target[dst] = BLOCKS[src]
    for block_id in corrupt:
        target[block_id].view(-1)[7] ^= 1
    found = corrupt_blocks(dst, checksums(BLOCKS, src), checksums(target, dst))
    assert found == [block_id for block_id in dst if block_id in corrupt]


def reserved(scheduler: DecodeScheduler) -> None:
    request = PrepareDecode(
        "proxy", ["r"], "t", pack_token_ids(list(range(14))), SamplingParams(), [1],
        StopConditions(10, frozenset()), 60.0, prefill_worker_id="prefill-0", prefill_epoch="e",
    )  # fmt: skip
    scheduler.on_prepare(0.0, request)
    scheduler.transfers.on_reserve(0.0, ReserveKV("pair", "t", 14))


def test_a_corrupt_block_fails_its_transfer_and_is_freed() -> None:
    scheduler = DecodeScheduler(BlockManager(8, 4), "model", max_num_seqs=2)
    reserved(scheduler)
    (receive,) = scheduler.transfers.on_ship(ShipKV("pair", 0, "t", 0, 2, [17, 18]))
    assert isinstance(receive, Receive) and receive.checksums == [17, 18]
    actions = scheduler.transfers.on_corrupt("t", KVTransferFailed("other bytes"))
    failed, refused = actions
    assert isinstance(failed, SendToProxy) and isinstance(failed.message, AttemptFailed)
    assert failed.message.error.code == "kv_transfer_failed"
    assert isinstance(refused, SendToPeer) and isinstance(refused.message, KVRefused)
    assert scheduler.blocks.num_quarantined == 4, "the peer has not confirmed yet that it stopped writing"
    scheduler.transfers.on_close_transfer("t")
    assert scheduler.blocks.num_free == 8 and scheduler.blocks.num_cached == 0


def test_the_number_of_checksums_must_match_the_blocks() -> None:
    scheduler = DecodeScheduler(BlockManager(8, 4), "model", max_num_seqs=2)
    reserved(scheduler)
    with pytest.raises(KVTransferFailed, match="1 checksums arrived for 2 blocks"):
        scheduler.transfers.on_ship(ShipKV("pair", 0, "t", 0, 2, [17]))
