"""Prompts that are decoded on the worker that has computed them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.decode_worker.decode_scheduler import Action
from tandem.engine.batch import BatchItem, ItemOutput
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.handover.actions import SendToPeer, SendToProxy
from tandem.protocol.messages.dispatch import (
    AttemptFailed,
    AttemptPreempted,
    FirstToken,
    PrepareDecode,
    StartPrefill,
    TokenBatch,
)
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tandem.protocol.messages.transfer import KVReserved, ReserveKV
from tandem.worker.worker_scheduler import WorkerScheduler

TOKENS = list(range(1, 7))
TOKEN = ItemOutput([SampledToken(9)])


def new_scheduler(num_blocks: int = 64) -> WorkerScheduler:
    return WorkerScheduler(BlockManager(num_blocks, 8), "m", max_num_batched_tokens=64, max_num_seqs=2, lease_s=10.0)


def start(
    scheduler: WorkerScheduler,
    name: str,
    num_sequences: int = 1,
    tokens: list[int] = TOKENS,
    max_tokens: int = 3,
    cache_salt: str | None = None,
) -> list[Action]:
    """cache_salt: the name if None, so that no other prompt finds its blocks."""
    ids = [f"{name}{number}" for number in range(num_sequences)]
    message = StartPrefill(
        "p", ids, name, pack_token_ids(tokens), SamplingParams(), [0] * num_sequences, StopConditions(max_tokens), 9.0,
        decode_worker_id="w", decode_epoch="e",
        cache_salt=name if cache_salt is None else cache_salt,
    )  # fmt: skip
    return scheduler.prefill.on_start(0.0, message, None, decodes_here=True)


def step(scheduler: WorkerScheduler, now: float = 1.0, step_s: float | None = None) -> tuple[int, list[Any]]:
    """Runs a step. Returns the number of its items and the messages to the proxy."""
    batch, actions = scheduler.schedule(now)
    outputs = [ItemOutput([SampledToken(9)] * len(item.samples)) for item in batch.items]
    if batch.items:
        actions += scheduler.on_step(now, outputs, step_s)
    return len(batch.items), [action.message for action in actions if isinstance(action, SendToProxy)]


def test_a_computed_prompt_runs_in_its_own_blocks() -> None:
    scheduler = new_scheduler()
    start(scheduler, "a", tokens=list(range(20)))
    _, [first] = step(scheduler)
    assert isinstance(first, FirstToken) and first.finish_reason is None
    assert scheduler.blocks.num_blocks - scheduler.blocks.num_free == 3, "the blocks of the prompt, held once"
    for expected in (None, "length"):
        _, [tokens] = step(scheduler)
        assert isinstance(tokens, TokenBatch) and tokens.tokens[0].finish_reason == expected
    assert scheduler.is_idle and scheduler.blocks.num_free == scheduler.blocks.num_blocks


def test_each_sequence_counts_where_it_ends() -> None:
    """With its first token in the prefill role, otherwise in the decode role."""
    scheduler = new_scheduler()
    prefill, decode = scheduler.prefill, scheduler.decode

    def figures() -> tuple[int, ...]:
        return (
            prefill.num_finished, prefill.num_shipped, prefill.num_prompt_tokens, prefill.num_cached_tokens,
            prefill.transfers.num_expired_leases, decode.num_finished, decode.num_preempted, decode.num_kept_blocks,
        )  # fmt: skip

    assert figures() == (0,) * 8
    start(scheduler, "a", 2, tokens=list(range(20)), max_tokens=1)
    step(scheduler)
    assert figures() == (2, 0, 20, 0, 0, 0, 0, 0)
    start(scheduler, "b", 2, tokens=list(range(20)), max_tokens=2)
    for _ in range(2):
        step(scheduler)
    assert figures() == (2, 0, 40, 0, 0, 2, 0, 0), "another client shares no blocks"
    start(scheduler, "c", 1, tokens=list(range(20)), max_tokens=2)
    step(scheduler)
    scheduler.on_abort("p", "c0")
    assert figures() == (2, 0, 60, 0, 0, 2, 0, 0), "an aborted one has not finished"


def test_a_step_holds_tokens_of_sequences_and_chunks_of_prompts() -> None:
    scheduler = new_scheduler()
    start(scheduler, "a")
    step(scheduler, step_s=0.5)
    start(scheduler, "b")
    number, messages = step(scheduler, step_s=0.5)
    assert number == 2
    assert [type(message) for message in messages] == [TokenBatch, FirstToken]
    assert scheduler.step_times.prompt_tokens_per_s == pytest.approx(len(TOKENS) / 0.5)


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 64, 65, 199, 200])
def test_all_full_blocks_of_a_prompt_are_cached_however_it_was_cut(num_tokens: int) -> None:
    scheduler = WorkerScheduler(BlockManager(64, 8), "m", max_num_batched_tokens=20, max_num_seqs=2, lease_s=10.0)
    for number, num_cached in enumerate((0, (num_tokens - 1) // 8 * 8)):
        before = scheduler.prefill.num_cached_tokens
        start(scheduler, f"t{number}", tokens=list(range(num_tokens)), max_tokens=1, cache_salt="one client")
        while not scheduler.is_idle:
            assert step(scheduler)[0]
        assert scheduler.prefill.num_cached_tokens - before == num_cached


def test_the_blocks_of_an_answer_are_cached_for_the_next_turn() -> None:
    scheduler = WorkerScheduler(BlockManager(64, 8), "m", max_num_batched_tokens=64, max_num_seqs=2, lease_s=10.0)
    start(scheduler, "a", tokens=list(range(20)), max_tokens=21, cache_salt="one client")
    while not scheduler.is_idle:
        step(scheduler)
    start(scheduler, "b", tokens=[*range(20), *[9] * 21, 5], max_tokens=1, cache_salt="one client")
    step(scheduler)
    assert scheduler.prefill.num_cached_tokens == 40, "the KV of the last token was never computed"


def test_sequences_that_share_a_prompt_copy_its_last_block() -> None:
    scheduler = new_scheduler()
    start(scheduler, "a", 2, tokens=list(range(20)))
    step(scheduler)
    batch, _ = scheduler.schedule(2.0)
    assert len(batch.items) == 2 and len(batch.block_copies) == 1
    [(source, destination)] = batch.block_copies
    tables = [list(item.block_table) for item in batch.items]
    assert tables[0][:2] == tables[1][:2] and {tables[0][2], tables[1][2]} == {source, destination}


def test_a_prompt_waits_for_a_place_behind_transfers() -> None:
    scheduler = new_scheduler()
    start(scheduler, "a")
    start(scheduler, "b")
    step(scheduler)
    prepare = PrepareDecode(
        "p", ["c0"], "c", pack_token_ids(TOKENS), SamplingParams(), [0], StopConditions(3), 9.0,
        prefill_worker_id="x", prefill_epoch="x", cache_salt="c",
    )  # fmt: skip
    actions = scheduler.decode.on_prepare(1.0, prepare)
    actions += scheduler.decode.transfers.on_reserve(1.0, ReserveKV("pair", "c", len(TOKENS)))
    start(scheduler, "d")
    assert not actions, "two sequences run already"
    assert step(scheduler)[0] == 2
    batch, _ = scheduler.schedule(2.0)
    answers = scheduler.on_step(2.0, [TOKEN] * len(batch.items))
    reserved = [action.message for action in answers if isinstance(action, SendToPeer)]
    assert [type(message) for message in reserved] == [KVReserved], "the transfer came first"
    assert step(scheduler)[0] == 1, "then the waiting prompt begins"


def test_a_request_that_never_fits_is_refused() -> None:
    scheduler = new_scheduler(num_blocks=4)
    [action] = start(scheduler, "a", max_tokens=40)
    assert isinstance(action, SendToProxy) and isinstance(action.message, AttemptFailed)
    assert "needs 6 KV blocks, this worker has 4" in action.message.error.message
    assert start(scheduler, "b", max_tokens=20) == []


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 40), st.integers(1, 3))
def test_what_is_admitted_runs_to_its_end_and_the_rest_is_refused(
    num_blocks: int, num_tokens: int, max_tokens: int, num_sequences: int
) -> None:
    """The KV of the last token is never needed. Sequences of one prompt need room to begin, and one of them to end."""
    scheduler = new_scheduler(num_blocks)
    is_refused = bool(start(scheduler, "a", num_sequences, list(range(num_tokens)), max_tokens))
    num_own = -(-(num_tokens + 1) // 8) - num_tokens // 8
    needed = max(-(-num_tokens // 8), -(-(num_tokens + max_tokens - 1) // 8), num_tokens // 8 + num_sequences * num_own)
    assert is_refused == (needed > num_blocks)
    if is_refused or num_sequences > 1:
        return
    finished, num_steps = False, 0
    while not finished:
        num_steps += 1
        assert num_steps < 100, "it would wait for ever"
        _, messages = step(scheduler)
        ends = [m.tokens[0].finish_reason if isinstance(m, TokenBatch) else m.finish_reason for m in messages]
        finished = ends == ["length"]
    assert scheduler.is_idle and scheduler.blocks.num_free == num_blocks


def test_an_abort_after_the_first_token_ends_the_sequence() -> None:
    scheduler = new_scheduler()
    start(scheduler, "a", 2)
    step(scheduler)
    scheduler.on_abort("p", "a0")
    assert step(scheduler)[0] == 1
    scheduler.on_abort("p", "a1")
    assert scheduler.is_idle and scheduler.blocks.num_free == scheduler.blocks.num_blocks


def test_a_transfer_is_served_when_the_prefill_role_releases_blocks() -> None:
    scheduler = new_scheduler(num_blocks=4)
    start(scheduler, "a", tokens=list(range(20)), max_tokens=1)
    batch, _ = scheduler.schedule(1.0)
    prepare = PrepareDecode(
        "p", ["c0"], "c", pack_token_ids(list(range(20))), SamplingParams(), [0], StopConditions(3), 9.0,
        prefill_worker_id="x", prefill_epoch="x", cache_salt="c",
    )  # fmt: skip
    actions = scheduler.decode.on_prepare(1.0, prepare)
    actions += scheduler.decode.transfers.on_reserve(1.0, ReserveKV("pair", "c", 20))
    assert not actions and scheduler.decode.reservations.is_blocked
    scheduler.on_step(1.5, [TOKEN] * len(batch.items))  # "a" ends with its first token
    _, actions = scheduler.schedule(2.0)
    assert any(isinstance(action, SendToPeer) for action in actions)
    assert not scheduler.decode.reservations.is_blocked


def test_the_prefill_role_yields_when_both_workers_are_full() -> None:
    scheduler = new_scheduler(num_blocks=4)
    message = StartPrefill(
        "p", ["a0"], "a", pack_token_ids(list(range(20))), SamplingParams(), [0], StopConditions(3), 9.0,
        decode_worker_id="x", decode_epoch="x", cache_salt="a",
    )  # fmt: skip
    scheduler.prefill.on_start(0.0, message, "pair-out")
    step(scheduler)
    prepare = PrepareDecode(
        "p", ["c0"], "c", pack_token_ids(list(range(20))), SamplingParams(), [0], StopConditions(3), 9.0,
        prefill_worker_id="x", prefill_epoch="x", cache_salt="c",
    )  # fmt: skip
    scheduler.decode.on_prepare(1.0, prepare)
    scheduler.decode.transfers.on_reserve(1.0, ReserveKV("pair-in", "c", 20))
    assert scheduler.on_tick(1.5) == []
    names = [type(action.message).__name__ for action in scheduler.on_tick(2.5) if hasattr(action, "message")]
    assert names == ["AttemptPreempted", "CloseTransfer"]
    _, actions = scheduler.schedule(2.5)
    assert [type(action) for action in actions if isinstance(action, SendToPeer)] == [SendToPeer]


# ---- out of memory

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


def test_a_prompt_that_does_not_fit_is_computed_in_smaller_chunks() -> None:
    scheduler = WorkerScheduler(BlockManager(64, 8), "m", max_num_batched_tokens=256, max_num_seqs=2, lease_s=10.0)
    start(scheduler, "a", tokens=list(range(200)))
    batch, _ = scheduler.schedule(1.0)
    assert [len(item.token_ids) for item in batch.items] == [200]
    assert scheduler.on_out_of_memory(NO_MEMORY) == []
    chunks = []
    while not chunks or sum(chunks) < 200:
        batch, _ = scheduler.schedule(1.0)
        chunks.append(len(batch.items[0].token_ids))
        assert batch.items[0].start == sum(chunks[:-1])
        actions = scheduler.on_step(1.0, [ItemOutput([SampledToken(9)] * len(batch.items[0].samples))])
    assert max(chunks) == 100
    [first] = [action.message for action in actions if isinstance(action, SendToProxy)]
    assert isinstance(first, FirstToken)


def test_chunks_grow_again_when_steps_fit() -> None:
    scheduler = WorkerScheduler(BlockManager(64, 8), "m", max_num_batched_tokens=256, max_num_seqs=2, lease_s=10.0)

    def compute(name: str, now: float) -> list[int]:
        start(scheduler, name, tokens=[len(name), *range(199)])
        chunks: list[int] = []
        while sum(chunks) < 200:
            batch, _ = scheduler.schedule(now)
            chunks.append(len(batch.items[0].token_ids))
            scheduler.on_step(now, [ItemOutput([SampledToken(9)] * len(batch.items[0].samples))])
        scheduler.on_abort("p", f"{name}0")
        return chunks

    start(scheduler, "a", tokens=list(range(200)))
    scheduler.schedule(1.0)
    scheduler.on_out_of_memory(NO_MEMORY)
    scheduler.on_abort("p", "a0")
    assert compute("aa", 2.0) == [100, 100]
    assert compute("aaa", 61.0) == [100, 100]
    assert compute("aaaa", 62.0) == [200]


def test_a_prompt_fails_if_its_smallest_chunk_does_not_fit() -> None:
    scheduler = WorkerScheduler(BlockManager(64, 8), "m", max_num_batched_tokens=256, max_num_seqs=2, lease_s=10.0)
    start(scheduler, "a", tokens=list(range(200)))
    failed: list[Any] = []
    for _ in range(3):
        scheduler.schedule(1.0)
        failed += scheduler.on_out_of_memory(NO_MEMORY)
    [message] = [action.message for action in failed]
    assert isinstance(message, AttemptFailed) and "out of memory" in message.error.message
    assert scheduler.is_idle and scheduler.blocks.num_free == scheduler.blocks.num_blocks


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("aborted", ["a", "b", "ab"])
def test_prompts_that_end_during_a_step_that_fails_leave_nothing(fails: bool, aborted: str) -> None:
    scheduler = WorkerScheduler(BlockManager(64, 8), "m", max_num_batched_tokens=256, max_num_seqs=2, lease_s=10.0)
    for name in "ab":
        start(scheduler, name, tokens=list(range(80)), max_tokens=1)
    batch, _ = scheduler.schedule(1.0)
    assert len(batch.items) == 2
    for name in aborted:
        scheduler.on_abort("p", f"{name}0")
    scheduler.on_step_failed(ValueError()) if fails else scheduler.on_out_of_memory(NO_MEMORY)
    answered = []
    while not scheduler.is_idle:
        number, messages = step(scheduler)
        assert number
        answered += [message.attempt_id for message in messages]
    assert answered == [f"{name}0" for name in "ab" if name not in aborted]
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks


def test_the_newest_sequences_are_preempted_when_their_step_does_not_fit() -> None:
    scheduler = new_scheduler()
    for name in "ab":
        start(scheduler, name, max_tokens=10)
        step(scheduler)
    batch, _ = scheduler.schedule(2.0)
    assert len(batch.items) == 2
    [preempted] = [action.message for action in scheduler.on_out_of_memory(NO_MEMORY)]
    assert preempted == AttemptPreempted("b0")
    _, [tokens] = step(scheduler)
    assert [token.attempt_id for token in tokens.tokens] == ["a0"]
    batch, _ = scheduler.schedule(3.0)
    [last] = [action.message for action in scheduler.on_out_of_memory(NO_MEMORY)]
    assert last == AttemptPreempted("a0")
    assert scheduler.is_idle and scheduler.blocks.num_free == scheduler.blocks.num_blocks


def test_others_survive_a_step_with_a_prompt_that_does_not_fit() -> None:
    scheduler = WorkerScheduler(BlockManager(64, 8), "m", max_num_batched_tokens=64, max_num_seqs=4, lease_s=10.0)
    start(scheduler, "a", max_tokens=9)
    step(scheduler)
    start(scheduler, "b", tokens=list(range(40)))
    start(scheduler, "c")
    batch, _ = scheduler.schedule(2.0)
    assert len(batch.items) == 3
    assert not scheduler.on_out_of_memory(NO_MEMORY)  # 64 tokens is the smallest step
    ended: dict[str, str] = {}
    for _ in range(40):
        batch, actions = scheduler.schedule(2.0)
        if any(item.token_ids[-1] == 39 for item in batch.items):
            actions += scheduler.on_out_of_memory(NO_MEMORY)
        elif batch.items:
            actions += scheduler.on_step(2.0, [TOKEN] * len(batch.items))
        for message in (action.message for action in actions if isinstance(action, SendToProxy)):
            assert not isinstance(message, AttemptPreempted)
            if isinstance(message, AttemptFailed):
                ended[message.attempt_id] = message.error.message
            elif isinstance(message, TokenBatch):
                ended |= {each.attempt_id: each.finish_reason for each in message.tokens if each.finish_reason}
    assert ended == {"a0": "length", "b0": "the model failed on this prompt: CUDA out of memory", "c0": "length"}


# ---- steps that fail


def run_with_poison(
    scheduler: WorkerScheduler, is_poisoned: Callable[[BatchItem], bool], max_steps: int = 900
) -> tuple[dict[str, int], dict[str, str], int]:
    """Runs steps, which fail if they have a poisoned item. Returns the number of tokens of each attempt, the errors of
    those that failed, and the number of failed steps."""
    tokens: Counter[str] = Counter()
    errors: dict[str, str] = {}
    num_failed = 0
    for _ in range(max_steps):
        batch, actions = scheduler.schedule(1.0)
        if not batch.items:
            break
        if any(map(is_poisoned, batch.items)):
            num_failed += 1
            actions += scheduler.on_step_failed(ValueError("poison"))
        else:
            actions += scheduler.on_step(1.0, [ItemOutput([SampledToken(9)] * len(i.samples)) for i in batch.items])
        for action in actions:
            match getattr(action, "message", None):
                case FirstToken(attempt_id=attempt_id):
                    tokens[attempt_id] += 1
                case TokenBatch() as sent:
                    tokens.update(token.attempt_id for token in sent.tokens)
                case AttemptFailed() as failed:
                    errors[failed.attempt_id] = failed.error.message
    return tokens, errors, num_failed


@given(
    st.lists(
        st.tuples(st.integers(1, 70), st.booleans(), st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=14
    ),
    st.integers(0, 9),
)
def test_only_what_makes_a_step_fail_fails(prompts: list[tuple[int, bool, int, int]], num_begun: int) -> None:
    """Prompts have a length, may be poisoned, and have numbers of tokens and of sequences. Some have begun before."""
    scheduler = WorkerScheduler(BlockManager(999, 8), "m", max_num_batched_tokens=96, max_num_seqs=16, lease_s=10.0)
    poison = {number + 1000 for number, (_, is_poisoned, *_) in enumerate(prompts) if is_poisoned}

    def is_poisoned(item: BatchItem) -> bool:
        return bool(poison & {*item.token_ids})

    for number, (length, _, max_tokens, num_sequences) in enumerate(prompts):
        if number == num_begun:
            step(scheduler)
        start(scheduler, f"{number}-", num_sequences, [number + 1000] * length, max_tokens)
    if num_begun < len(prompts) and any(is_bad for _, is_bad, *_ in prompts[:num_begun]):
        return  # the first step is not run with poison
    tokens, errors, num_failed = run_with_poison(scheduler, is_poisoned)
    assert errors.keys() == {
        f"{number}-{each}" for number, (_, is_bad, _, count) in enumerate(prompts) if is_bad for each in range(count)
    }
    for number, (_, is_bad, max_tokens, count) in enumerate(prompts):
        begun = number < num_begun < len(prompts)
        for each in range(count):
            assert tokens[f"{number}-{each}"] >= (0 if is_bad else max_tokens - begun), (
                "those from before are not counted"
            )
    assert num_failed <= len(poison) * 10
    assert scheduler.is_idle and scheduler.blocks.num_free == scheduler.blocks.num_blocks


def test_a_sequence_that_makes_steps_fail_is_found_by_halves() -> None:
    scheduler = WorkerScheduler(BlockManager(999, 8), "m", max_num_batched_tokens=96, max_num_seqs=64, lease_s=10.0)
    for number in range(33):
        start(scheduler, f"{number}-", tokens=[number + 1], max_tokens=5)  # no sequence gets the block of another
    step(scheduler)
    block = scheduler.decode.sequences.by_attempt["p", "20-0"].block_table[0]
    tokens, errors, num_failed = run_with_poison(scheduler, lambda item: block in item.block_table)
    assert set(errors) == {"20-0"} and num_failed <= 7
    assert {count for attempt_id, count in tokens.items() if attempt_id != "20-0"} == {4}


def test_others_take_every_second_step_while_one_client_s_prompts_fail() -> None:
    """60 prompts that fail take 120 steps. A stream and a new prompt beside them do not wait for that."""
    scheduler = WorkerScheduler(BlockManager(999, 8), "m", max_num_batched_tokens=960, max_num_seqs=128, lease_s=10.0)
    start(scheduler, "stream", max_tokens=200)
    step(scheduler)
    for number in range(60):
        start(scheduler, f"the same client: {number}", tokens=[1000] * 5)
    got: list[str] = []
    failed: set[str] = set()
    for number in range(400):
        if number == 9:
            start(scheduler, "late")
        batch, actions = scheduler.schedule(1.0)
        if not batch.items:
            break
        if any(1000 in item.token_ids for item in batch.items):
            actions += scheduler.on_step_failed(ValueError("poison"))
        else:
            actions += scheduler.on_step(1.0, [TOKEN] * len(batch.items))
        messages = [action.message for action in actions if isinstance(action, SendToProxy)]
        failed |= {message.attempt_id for message in messages if isinstance(message, AttemptFailed)}
        got.append("t" if any(isinstance(message, TokenBatch) for message in messages) else "-")
        if any(isinstance(message, FirstToken) for message in messages):
            assert number < 14, "a new prompt of another client waits for a few steps"
    assert len(failed) == 60
    assert "---" not in "".join(got), "the stream waits for one failing step at a time"


def test_who_is_left_of_a_failed_step_is_not_the_cause() -> None:
    """The cause was aborted while the step ran."""
    scheduler = new_scheduler()
    start(scheduler, "a")
    start(scheduler, "b")
    scheduler.schedule(1.0)
    scheduler.on_abort("p", "a0")
    assert not [a for a in scheduler.on_step_failed(ValueError("poison")) if isinstance(a, SendToProxy)]
    _, [first] = step(scheduler)
    assert isinstance(first, FirstToken) and first.attempt_id == "b0"


def test_a_prompt_that_was_aborted_in_a_step_that_fails_is_not_computed_again() -> None:
    """It would make each step fail from then on."""
    scheduler = new_scheduler()
    start(scheduler, "a")
    scheduler.schedule(1.0)
    scheduler.on_abort("p", "a0")
    assert scheduler.on_step_failed(ValueError("poison")) == []
    assert scheduler.is_idle and not scheduler.schedule(1.0)[0].items
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks


def test_no_step_is_submitted_ahead_while_members_run_apart() -> None:
    scheduler = new_scheduler()
    for name in "ab":
        start(scheduler, name, max_tokens=10)
    step(scheduler)
    scheduler.schedule(2.0)
    ahead, _ = scheduler.schedule_ahead(2.0)
    assert len(ahead.items) == 2
    scheduler.on_step_failed(ValueError("poison"))
    for _ in range(3):  # one of them twice, because it is not the cause
        batch, _ = scheduler.schedule(2.0)
        assert len(batch.items) == 1
        if not scheduler._isolation.is_over:
            assert not scheduler.schedule_ahead(2.0)[0].items
        scheduler.on_step(2.0, [TOKEN])
    assert len(scheduler.schedule(2.0)[0].items) == 2
