"""A prefill worker dies during a transfer: arrived blocks, and only those, are reused under the next transfer_id."""

from __future__ import annotations

import pytest

from tandem.decode_worker.decode_scheduler import Action, DecodeScheduler
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.handover.actions import SendToPeer
from tandem.protocol.messages.dispatch import PrepareDecode
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.protocol.messages.transfer import (
    CloseTransfer,
    FinishTransfer,
    KVRefused,
    KVReserved,
    ReservedBlocks,
    ReserveKV,
    ShipKV,
)
from tandem.runtime.errors import KVTransferFailed

BLOCK_SIZE, NUM_BLOCKS = 4, 20
PROMPT = list(range(1, 23))
"""Five full blocks and a half."""


def scheduler() -> DecodeScheduler:
    return DecodeScheduler(BlockManager(NUM_BLOCKS, BLOCK_SIZE), "m", max_num_seqs=8)


def prepare(name: str, prefill: str, salt: str = "") -> PrepareDecode:
    return PrepareDecode(
        "p", [f"r-{name}"], name, pack_token_ids(PROMPT), SamplingParams(), [0], StopConditions(4), 9.0,
        prefill_worker_id=prefill, prefill_epoch=f"{prefill}/1", cache_salt=salt,
    )  # fmt: skip


def begin(decode: DecodeScheduler, name: str, prefill: str, salt: str = "") -> ReservedBlocks:
    decode.on_prepare(0.0, prepare(name, prefill, salt))
    [answer] = to_prefill(decode.transfers.on_reserve(0.0, ReserveKV(f"pair-{prefill}", name, len(PROMPT))))
    assert isinstance(answer, KVReserved)
    [blocks] = answer.groups
    return blocks


def to_prefill(actions: list[Action]) -> list[object]:
    return [action.message for action in actions if isinstance(action, SendToPeer)]


def arrive(decode: DecodeScheduler, name: str, number: int, first: int, count: int, prefill: str = "a") -> None:
    decode.transfers.on_ship(ShipKV(f"pair-{prefill}", number, name, first, count))
    decode.transfers.on_received(name, None)


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "frozen"])
def test_the_next_attempt_reuses_arrived_blocks(is_gone: bool) -> None:
    decode = scheduler()
    first = begin(decode, "t1", "a")
    arrive(decode, "t1", 0, 0, 2)
    arrive(decode, "t1", 1, 2, 1)
    decode.transfers.on_ship(ShipKV("pair-a", 2, "t1", 3, 1))  # announced, still in flight
    decode.transfers.on_pair_lost("pair-a", "exited", peer_stopped=is_gone)
    decode.blocks.check()
    assert decode.num_kept_blocks == 3
    second = begin(decode, "t2", "b")
    assert second.first_block == 3 and len(second.block_ids) == 3
    assert not set(second.block_ids) & set(first.block_ids), "these blocks still belong to the old transfer"
    decode.transfers.on_received("t1", KVTransferFailed("the pair is closed"))
    arrive(decode, "t2", 0, 3, 3, "b")
    decode.transfers.on_finish_transfer(FinishTransfer("t2", len(PROMPT), [7]))
    batch, _ = decode.schedule(0.0)
    [item] = batch.items
    assert item.block_table[:6] == first.block_ids[:3] + second.block_ids
    decode.on_abort("p", "r-t2")
    decode.on_step_failed(RuntimeError("over"))
    decode.blocks.check()
    assert decode.blocks.num_quarantined == 0 and decode.blocks.num_free == NUM_BLOCKS


def test_only_blocks_that_a_frozen_peer_may_write_stay_quarantined() -> None:
    decode = scheduler()
    first = begin(decode, "t1", "a")
    arrive(decode, "t1", 0, 0, 2)
    decode.transfers.on_pair_lost("pair-a", "left the cluster", peer_stopped=False)
    assert decode.blocks.num_quarantined == len(first.block_ids) - 2
    assert decode.blocks.num_free == NUM_BLOCKS - len(first.block_ids) + 2
    begin(decode, "t2", "b")
    decode.on_abort("p", "r-t2")
    decode.transfers.on_close_transfer(CloseTransfer("t2").transfer_id)
    decode.transfers.on_close_transfer("t1")  # the prefill worker has woken up
    decode.blocks.check()
    assert decode.blocks.num_quarantined == 0 and decode.blocks.num_free == NUM_BLOCKS


def test_blocks_after_a_corrupt_one_are_not_kept() -> None:
    decode = scheduler()
    begin(decode, "t1", "a")
    arrive(decode, "t1", 0, 0, 1)
    decode.transfers.on_ship(ShipKV("pair-a", 1, "t1", 1, 1))
    decode.transfers.on_ship(ShipKV("pair-a", 2, "t1", 2, 1))
    [refusal] = to_prefill(decode.transfers.on_corrupt("t1", KVTransferFailed("other bytes")))
    assert isinstance(refusal, KVRefused)
    decode.transfers.on_received("t1", None)
    assert decode.num_kept_blocks == 1
    assert begin(decode, "t2", "b").first_block == 1


def test_a_partial_last_block_is_not_kept() -> None:
    """Everything has arrived except the first token."""
    decode = scheduler()
    begin(decode, "t1", "a")
    arrive(decode, "t1", 0, 0, 6)
    decode.transfers.on_pair_lost("pair-a", "exited", peer_stopped=True)
    assert decode.num_kept_blocks == 5
    assert begin(decode, "t2", "b").first_block == 5


def test_kept_blocks_are_not_shared_across_salts() -> None:
    decode = scheduler()
    begin(decode, "t1", "a", salt="x")
    arrive(decode, "t1", 0, 0, 3)
    decode.transfers.on_pair_lost("pair-a", "exited", peer_stopped=True)
    assert begin(decode, "t2", "b", salt="y").first_block == 0


@pytest.mark.parametrize("has_reserved", [True, False])
def test_prompts_of_a_proxy_that_decode_has_lost_are_tried_again(has_reserved: bool) -> None:
    """The prefill worker may still reach that proxy, and tells it why the transfer has ended."""
    decode = scheduler()
    if has_reserved:
        begin(decode, "t", "a")
        answers = to_prefill(decode.on_proxy_lost("p"))
    else:
        decode.on_prepare(0.0, prepare("t", "a"))
        assert not to_prefill(decode.on_proxy_lost("p"))
        answers = to_prefill(decode.transfers.on_reserve(0.0, ReserveKV("pair-a", "t", len(PROMPT))))
    [refusal] = answers
    assert isinstance(refusal, KVRefused) and isinstance(refusal.error.to_error(), KVTransferFailed)
