"""Decode admits no more sequences than one step takes; others wait for their first token."""

from __future__ import annotations

from collections import Counter

from tandem.decode_worker.decode_scheduler import Action, DecodeScheduler
from tandem.engine.batch import ItemOutput
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.handover.actions import SendToPeer, SendToProxy
from tandem.protocol.messages.dispatch import PrepareDecode, TokenBatch
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tandem.protocol.messages.transfer import (
    CloseTransfer,
    FinishTransfer,
    KVReserved,
    ReserveKV,
    ShipKV,
)

TOKENS = list(range(1, 7))
TOKEN = ItemOutput([SampledToken(9)])


def ask(scheduler: DecodeScheduler, name: str, num_sequences: int = 1) -> list[str]:
    """Returns the transfers that are reserved now."""
    ids = [f"{name}{number}" for number in range(num_sequences)]
    message = PrepareDecode(
        "p", ids, name, pack_token_ids(TOKENS), SamplingParams(), [0] * num_sequences, StopConditions(3), 9.0,
        prefill_worker_id="prefill-0", prefill_epoch="e", cache_salt=name,
    )  # fmt: skip
    actions = scheduler.on_prepare(0.0, message)
    actions += scheduler.transfers.on_reserve(0.0, ReserveKV("pair", name, len(TOKENS)))
    return reserved(actions)


def reserved(actions: list[Action]) -> list[str]:
    messages = [action.message for action in actions if isinstance(action, SendToPeer)]
    return [message.transfer_id for message in messages if isinstance(message, KVReserved)]


def begin(scheduler: DecodeScheduler, name: str, number: int, num_sequences: int = 1) -> None:
    scheduler.transfers.on_ship(ShipKV("pair", number, name, 0, 1))
    scheduler.transfers.on_received(name, None)
    scheduler.transfers.on_finish_transfer(FinishTransfer(name, len(TOKENS), [7] * num_sequences))


def new_scheduler() -> DecodeScheduler:
    return DecodeScheduler(BlockManager(64, 8), "m", max_num_seqs=2)


def test_a_full_batch_delays_reservations() -> None:
    scheduler = new_scheduler()
    assert ask(scheduler, "a") == ["a"]
    assert ask(scheduler, "b") == ["b"]
    begin(scheduler, "a", 0)  # a is running and b has reserved; both count
    assert ask(scheduler, "c") == [] and ask(scheduler, "d") == []
    begin(scheduler, "b", 1)
    for _ in range(2):
        batch, _actions = scheduler.schedule(1.0)
        assert len(batch.items) == 2
        now_reserved = reserved(scheduler.on_step(1.5, [TOKEN, TOKEN]))
    assert now_reserved == ["c", "d"], "both running sequences end with their third token"


def test_an_aborted_transfer_frees_its_place() -> None:
    scheduler = new_scheduler()
    assert ask(scheduler, "a", 2) == ["a"]
    assert ask(scheduler, "b") == []
    assert reserved(scheduler.on_abort("p", "a0")) == []
    assert reserved(scheduler.on_abort("p", "a1")) == ["b"], (
        "its place is free although its blocks may still be written"
    )
    scheduler.transfers.on_close_transfer(CloseTransfer("a").transfer_id)
    scheduler.on_abort("p", "b0")
    scheduler.transfers.on_close_transfer("b")
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks


def test_a_request_with_more_sequences_than_a_step_runs_alone() -> None:
    scheduler = new_scheduler()
    assert ask(scheduler, "a", 3) == ["a"]
    assert ask(scheduler, "b") == []
    begin(scheduler, "a", 0, 3)
    assert len(scheduler.schedule(1.0)[0].items) == 2


def test_all_sequences_of_such_a_request_take_turns() -> None:
    scheduler = new_scheduler()
    ask(scheduler, "a", 5)
    begin(scheduler, "a", 0, 5)
    num_tokens: Counter[str] = Counter()
    for _ in range(5):
        batch, _actions = scheduler.schedule(1.0)
        actions = scheduler.on_step(1.5, [TOKEN] * len(batch.items))
        batches = [each.message for each in actions if isinstance(each, SendToProxy)]
        num_tokens.update(token.attempt_id for each in batches if isinstance(each, TokenBatch) for token in each.tokens)
    assert num_tokens == {f"a{number}": 2 for number in range(5)} and scheduler.is_idle


def test_a_block_for_each_running_sequence_stays_free() -> None:
    """A new one does not take what the others grow into: one of them would be preempted for it."""
    scheduler = DecodeScheduler(BlockManager(7, 8), "m", max_num_seqs=9)
    for number, name in enumerate("abcd"):
        assert ask(scheduler, name) == [name]
        begin(scheduler, name, number)
    assert scheduler.blocks.num_free == 3
    assert ask(scheduler, "e") == [] and not scheduler.is_idle
    assert reserved(scheduler.on_abort("p", "b0")) == ["e"], "three run, and four blocks were free"
