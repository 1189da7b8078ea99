"""What a step samples with, behind a migration, an abort of a sibling, and a step that did not fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tandem.engine.batch import Batch
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.handover.actions import SendToProxy
from tandem.protocol.messages.dispatch import AttemptPreempted, PrepareDecode, StartPrefill
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.protocol.messages.transfer import FinishTransfer, KVReserved, ReserveKV, ShipKV
from tandem.worker.worker_scheduler import WorkerScheduler
from tests.unit.worker.test_worker_scheduler import TOKEN, new_scheduler, start, step

PROMPT, GENERATED = list(range(20)), [31, 32, 33]
PENALISED = SamplingParams(frequency_penalty=0.5, seed=1)


def dispatched(kind: Any, num_sequences: int = 1, **fields: Any) -> Any:
    """Returns the message that dispatches sequences again, which have generated three tokens before."""
    return kind(
        "p", [f"a{number}" for number in range(num_sequences)], "t", pack_token_ids([*PROMPT, *GENERATED]),
        PENALISED, [5 + number for number in range(num_sequences)], StopConditions(30, frozenset({7}), min_tokens=5),
        9.0, num_generated=len(GENERATED), **fields,
    )  # fmt: skip


def arrived(message: PrepareDecode, first_tokens: list[int], aborted: str = "") -> Batch:
    """Lets the KV of a prompt arrive at a decode worker, and returns its next step."""
    scheduler = WorkerScheduler(BlockManager(64, 8), "m", 64, 4, lease_s=10.0).decode
    scheduler.on_prepare(0.0, message)
    actions: list[Any] = scheduler.transfers.on_reserve(0.0, ReserveKV("pair", "t", len(PROMPT) + len(GENERATED)))
    [reserved] = [each.message for each in actions if isinstance(each.message, KVReserved)]
    if aborted:
        scheduler.on_abort("p", aborted)
    scheduler.transfers.on_ship(ShipKV("pair", 0, "t", 0, len(reserved.groups[0].block_ids)))
    scheduler.transfers.on_received("t", None)
    scheduler.transfers.on_finish_transfer(FinishTransfer("t", len(PROMPT) + len(GENERATED), first_tokens))
    return scheduler.schedule(1.0)[0]


def check_sample(sample: Any, output: list[int], seed: int) -> None:
    assert list(sample.prompt_token_ids) == PROMPT and list(sample.output_token_ids) == output
    assert sample.params == msgspec.structs.replace(PENALISED, seed=seed)


def test_a_migrated_sequence_is_sampled_like_one_that_stayed() -> None:
    """Penalties know what was generated before, and `min_tokens` counts it."""
    scheduler = new_scheduler()
    scheduler.prefill.on_start(0.0, dispatched(StartPrefill, decode_worker_id="w", decode_epoch="e"), None,
                               decodes_here=True)  # fmt: skip
    bans = []
    for output in (GENERATED, [*GENERATED, 9], [*GENERATED, 9, 9]):
        batch, _ = scheduler.schedule(1.0)
        [sample] = batch.items[0].samples
        check_sample(sample, output, 5)
        bans.append(set(sample.banned_token_ids))
        scheduler.on_step(1.0, [TOKEN])
    assert bans == [{7}, {7}, set()]


def test_a_migrated_sequence_is_decoded_elsewhere_like_one_that_stayed() -> None:
    prepare = dispatched(PrepareDecode, prefill_worker_id="x", prefill_epoch="x")
    [item] = arrived(prepare, [34]).items
    check_sample(item.samples[0], [*GENERATED, 34], 5)
    assert set(item.samples[0].banned_token_ids) == {7}, "the fifth token is still to come"


def test_siblings_keep_their_tokens_and_seeds_when_one_is_aborted() -> None:
    prepare = dispatched(PrepareDecode, 3, prefill_worker_id="x", prefill_epoch="x")
    for aborted in range(3):
        items = arrived(prepare, [41, 42, 43], f"a{aborted}").items
        left = [number for number in range(3) if number != aborted]
        assert [list(item.token_ids) for item in items] == [[41 + number] for number in left]
        for number, item in zip(left, items, strict=True):
            check_sample(item.samples[0], [*GENERATED, 41 + number], 5 + number)


@pytest.mark.parametrize("aborted", [None, "a0", "a1", "a2"])
@pytest.mark.parametrize("fails", [True, False])
def test_the_copies_of_a_step_that_fails_or_does_not_fit_are_made_again(fails: bool, aborted: str | None) -> None:
    scheduler = WorkerScheduler(BlockManager(64, 8), "m", max_num_batched_tokens=64, max_num_seqs=9, lease_s=10.0)
    start(scheduler, "b", max_tokens=9)
    start(scheduler, "a", 3, tokens=list(range(20)))
    step(scheduler)
    copied, _ = scheduler.schedule(2.0)
    assert len(copied.items) == 4 and len(copied.block_copies) == 2
    if aborted is not None:
        scheduler.on_abort("p", aborted)
    actions = scheduler.on_step_failed(ValueError()) if fails else scheduler.on_out_of_memory(MemoryError())
    messages = [each.message for each in actions if isinstance(each, SendToProxy)]
    preempted = [message for message in messages if isinstance(message, AttemptPreempted)]
    assert len(preempted) == (0 if fails else 2 - (aborted in ("a1", "a2")))
    copies: dict[int, int] = {}
    made = set(map(tuple, copied.block_copies))
    with_tokens: set[int] = set()  # own blocks
    while True:
        batch, _ = scheduler.schedule(3.0)
        if not batch.items:
            break
        copies |= {destination: source for source, destination in batch.block_copies}
        assert made >= set(map(tuple, batch.block_copies))
        for item in batch.items:
            with_tokens |= set(item.block_table[2:3])
        scheduler.on_step(3.0, [TOKEN] * len(batch.items))
    assert set(copies) == with_tokens & {destination for _, destination in made}, "no sequence goes on without its copy"
    assert scheduler.is_idle and scheduler.blocks.num_free == scheduler.blocks.num_blocks


def test_the_copies_of_a_step_that_was_submitted_ahead_are_made_again() -> None:
    scheduler = WorkerScheduler(BlockManager(64, 8), "m", max_num_batched_tokens=64, max_num_seqs=9, lease_s=10.0)
    start(scheduler, "a", 2, tokens=list(range(20)), max_tokens=9)
    step(scheduler)
    first, _ = scheduler.schedule(2.0)
    scheduler.schedule_ahead(2.0)
    assert not scheduler.on_step_failed(ValueError())
    again = [copy for _ in range(3) for copy in one_of_a_failed_step(scheduler)]
    assert again == first.block_copies


def one_of_a_failed_step(scheduler: WorkerScheduler) -> Sequence[tuple[int, int]]:
    batch, _ = scheduler.schedule(3.0)
    assert len(batch.items) == 1
    scheduler.on_step(3.0, [TOKEN])
    return batch.block_copies
