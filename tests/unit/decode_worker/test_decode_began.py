"""Decode reports each sequence's waiting time and step duration once, with its first token."""

from __future__ import annotations

from tandem.decode_worker.decode_scheduler import Action, DecodeScheduler
from tandem.engine.batch import ItemOutput
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.handover.actions import SendToProxy
from tandem.protocol.codec import Codec
from tandem.protocol.messages.dispatch import DecodeBegan, NewToken, PrepareDecode, TokenBatch, ToProxy
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tandem.protocol.messages.transfer import FinishTransfer, ReserveKV, ShipKV

TOKENS = list(range(1, 7))
TOKEN = ItemOutput([SampledToken(9)])


def join(scheduler: DecodeScheduler, number: int) -> None:
    """Adds a prompt whose KV arrives at once."""
    transfer_id = f"t{number}"
    message = PrepareDecode(
        "p", [f"r{number}"], transfer_id, pack_token_ids(TOKENS), SamplingParams(), [0], StopConditions(10),
        9.0, prefill_worker_id="prefill-0", prefill_epoch="e", cache_salt=transfer_id,
    )  # fmt: skip
    scheduler.on_prepare(0.0, message)
    scheduler.transfers.on_reserve(0.0, ReserveKV("pair", transfer_id, len(TOKENS)))
    num_blocks = scheduler.blocks.num_blocks_for(len(TOKENS))
    scheduler.transfers.on_ship(ShipKV("pair", number, transfer_id, 0, num_blocks))
    scheduler.transfers.on_received(transfer_id, None)
    scheduler.transfers.on_finish_transfer(FinishTransfer(transfer_id, len(TOKENS), [7]))


def batches(actions: list[Action]) -> list[TokenBatch]:
    return [a.message for a in actions if isinstance(a, SendToProxy) and isinstance(a.message, TokenBatch)]


def test_a_sequence_that_joins_during_a_step_waits_for_the_next() -> None:
    scheduler = DecodeScheduler(BlockManager(32, 8), "m", max_num_seqs=8, block_bytes=100)
    join(scheduler, 0)
    batch, _ = scheduler.schedule(1.0)
    assert len(batch.items) == 1
    join(scheduler, 1)
    scheduler.running.on_clock(1.25)  # the shell calls it after each event during a step
    [reported] = batches(scheduler.on_step(2.0, [TOKEN]))
    assert reported.began == [DecodeBegan("r0", 0.0, 1.0, 100)]
    batch, _ = scheduler.schedule(2.0)
    assert len(batch.items) == 2
    [reported] = batches(scheduler.on_step(2.5, [TOKEN, TOKEN]))
    assert [token.attempt_id for token in reported.tokens] == ["r0", "r1"]
    assert reported.began == [DecodeBegan("r1", 0.75, 0.5, 100)]
    scheduler.schedule(2.5)
    [reported] = batches(scheduler.on_step(3.0, [TOKEN, TOKEN]))
    assert reported.began == []


def test_an_empty_began_list_is_not_encoded() -> None:
    codec: Codec[ToProxy] = Codec(ToProxy)
    tokens = [NewToken("r0", SampledToken(9))]
    assert b"began" not in codec.encode(TokenBatch(tokens))
    began = TokenBatch(tokens, [DecodeBegan("r0", 0.5, 0.25)])
    assert codec.decode(codec.encode(began)) == began
