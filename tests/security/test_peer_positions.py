"""A prefill worker cannot make a decode worker's step fail by a position that no model has."""

from __future__ import annotations

import pytest

from tandem.decode_worker.decode_scheduler import DecodeScheduler
from tandem.engine.attention.step_index import StepIndex
from tandem.engine.batch import BatchItem
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.handover.actions import SendToProxy
from tandem.protocol.messages.checks import MAX_POSITION_OFFSET, check_finish_transfer
from tandem.protocol.messages.dispatch import AttemptFailed, PrepareDecode
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.protocol.messages.transfer import FinishTransfer, ReserveKV, ShipKV
from tandem.runtime.errors import InvalidMessage

TOKENS = list(range(1, 7))


@pytest.mark.parametrize("offset", [2**31 - 1, 2**31, 2**63, -(2**31) - 1, MAX_POSITION_OFFSET + 1])
def test_an_offset_that_would_overflow_is_refused(offset: int) -> None:
    with pytest.raises(InvalidMessage, match="position_offset"):
        check_finish_transfer(FinishTransfer("t", 3, [1], offset), 100)


@pytest.mark.parametrize("offset", [0, -4000, MAX_POSITION_OFFSET, -MAX_POSITION_OFFSET])
def test_an_offset_within_the_limit_makes_a_step(offset: int) -> None:
    check_finish_transfer(FinishTransfer("t", 3, [1], offset), 100)
    far = 2**20
    item = BatchItem([1], far, list(range(far // 64 + 1)), position_offset=offset)
    assert StepIndex.of([item], 64).positions.tolist() == [far + offset]


def test_an_offset_for_a_prompt_without_media_fails_that_prompt_only() -> None:
    scheduler = DecodeScheduler(BlockManager(32, 8), "m", max_num_seqs=8)
    actions = []
    for number, offset in enumerate((0, 5)):
        transfer_id = f"t{number}"
        prepare = PrepareDecode(
            "p", [f"r{number}"], transfer_id, pack_token_ids(TOKENS), SamplingParams(), [0], StopConditions(10),
            9.0, prefill_worker_id="prefill-0", prefill_epoch="e", cache_salt=transfer_id,
        )  # fmt: skip
        scheduler.on_prepare(0.0, prepare)
        scheduler.transfers.on_reserve(0.0, ReserveKV("pair", transfer_id, len(TOKENS)))
        scheduler.transfers.on_ship(
            ShipKV("pair", number, transfer_id, 0, scheduler.blocks.num_blocks_for(len(TOKENS)))
        )
        scheduler.transfers.on_received(transfer_id, None)
        actions += scheduler.transfers.on_finish_transfer(FinishTransfer(transfer_id, len(TOKENS), [7], offset))
    messages = [action.message for action in actions if isinstance(action, SendToProxy)]
    [failed] = [message for message in messages if isinstance(message, AttemptFailed)]
    assert (failed.attempt_id, failed.error.code) == ("r1", "kv_transfer_failed")
    batch, _ = scheduler.schedule(1.0)
    assert [item.position_offset for item in batch.items] == [0]
    scheduler.blocks.check()
