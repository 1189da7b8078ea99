"""Properties of both roles on one worker: any lengths, any members that make steps fail. `scripts/` show its cases."""

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
from tandem.handover.actions import SendToProxy
from tandem.protocol.messages.dispatch import (
    AttemptFailed,
    FirstToken,
    StartPrefill,
    TokenBatch,
)
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
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


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 64, 65, 199, 200])
def test_all_full_blocks_of_a_prompt_are_cached_however_it_was_cut(num_tokens: int) -> None:
    scheduler = WorkerScheduler(BlockManager(64, 8), "m", max_num_batched_tokens=20, max_num_seqs=2, lease_s=10.0)
    for number, num_cached in enumerate((0, (num_tokens - 1) // 8 * 8)):
        before = scheduler.prefill.num_cached_tokens
        start(scheduler, f"t{number}", tokens=list(range(num_tokens)), max_tokens=1, cache_salt="one client")
        while not scheduler.is_idle:
            assert step(scheduler)[0]
        assert scheduler.prefill.num_cached_tokens - before == num_cached


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


# ---- out of memory

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


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


def test_a_prompt_that_was_aborted_in_a_step_that_fails_is_not_computed_again() -> None:
    """It would make each step fail from then on."""
    scheduler = new_scheduler()
    start(scheduler, "a")
    scheduler.schedule(1.0)
    scheduler.on_abort("p", "a0")
    assert scheduler.on_step_failed(ValueError("poison")) == []
    assert scheduler.is_idle and not scheduler.schedule(1.0)[0].items
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
