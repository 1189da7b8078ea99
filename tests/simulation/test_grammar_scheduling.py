"""Schedulers and grammars: no sequence is sampled before its grammar is compiled, and a failure affects only that
sequence."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from tandem.decode_worker.decode_scheduler import DecodeScheduler
from tandem.engine.batch import ItemOutput
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.sampling.grammar import Grammar
from tandem.handover.actions import SendToProxy
from tandem.protocol.messages.dispatch import AttemptFailed, FirstToken, PrepareDecode, StartPrefill, TokenBatch
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tandem.protocol.messages.transfer import FinishTransfer, ReserveKV, ShipKV
from tandem.runtime.errors import ErrorInfo, InvalidRequest
from tandem.worker.worker_scheduler import WorkerScheduler

SAMPLING = SamplingParams(grammar="start: /a+/")
STOP = StopConditions(10, frozenset({0}))
TOKENS = list(range(1, 7))
ERROR = ItemOutput([SampledToken(1)], error=ErrorInfo.of(InvalidRequest("the grammar cannot be followed: x")))


def grammar() -> tuple[Grammar, Future[Any]]:
    compiled: Future[Any] = Future()
    return Grammar(compiled), compiled


def start(number: int, sampling: SamplingParams, num_sequences: int = 1, num_generated: int = 0) -> StartPrefill:
    ids = [f"r{number}.{i}" for i in range(num_sequences)]
    packed = pack_token_ids(TOKENS)
    return StartPrefill(
        "p",
        ids,
        f"t{number}",
        packed,
        sampling,
        [0] * num_sequences,
        STOP,
        9.0,
        decode_worker_id=None,
        decode_epoch=None,
        num_generated=num_generated,
    )


def prepare(number: int, sampling: SamplingParams, num_sequences: int = 1, num_generated: int = 0) -> PrepareDecode:
    """Salted, so that each prompt is shipped whole."""
    s = start(number, sampling, num_sequences, num_generated)
    return PrepareDecode(
        s.proxy_id, s.attempt_ids, s.transfer_id, s.token_ids, sampling, s.seeds, STOP, 9.0,
        prefill_worker_id="prefill-0", prefill_epoch="e",
        num_generated=num_generated, cache_salt=s.transfer_id,
    )  # fmt: skip


def test_prefill_starts_a_prompt_once_its_grammar_is_compiled() -> None:
    scheduler = WorkerScheduler(BlockManager(20, 4), "model", 512, 8, 9.0).prefill
    shared, compiled = grammar()
    scheduler.on_start(0.0, start(1, SAMPLING, num_sequences=2, num_generated=2), None, shared)
    scheduler.on_start(0.0, start(2, SamplingParams()), None, None)
    batch, _ = scheduler.schedule(0.0)
    assert [item.samples[0].grammar for item in batch.items] == [None]  # the other prompt overtakes it
    scheduler.on_step(0.0, [ItemOutput([SampledToken(5)])])
    assert not scheduler.schedule(0.0)[0].items
    compiled.set_result(None)
    [item] = scheduler.schedule(0.0)[0].items
    assert item.samples[0].grammar is item.samples[1].grammar is not None
    assert list(item.samples[0].output_token_ids) == TOKENS[-2:]  # the grammar's state is built from these tokens
    actions = scheduler.on_step(0.0, [ItemOutput(ERROR.tokens * 2, error=ERROR.error)])
    messages = [action.message for action in actions if isinstance(action, SendToProxy)]
    assert [type(message) for message in messages] == [AttemptFailed, AttemptFailed]
    assert not any(isinstance(message, FirstToken) for message in messages)
    assert not scheduler.schedule(0.0)[0].items and scheduler.prompts.num_running == 1  # the prompt without a grammar


@pytest.fixture
def decode() -> DecodeScheduler:
    return DecodeScheduler(BlockManager(20, 4), "model", 8)


def begin(scheduler: DecodeScheduler, request: PrepareDecode, of: Grammar | None) -> None:
    """All of its KV has arrived."""
    scheduler.on_prepare(0.0, request, of)
    number, transfer_id = request.transfer_id[1:], request.transfer_id
    scheduler.transfers.on_reserve(0.0, ReserveKV("pair", transfer_id, len(TOKENS)))
    num_blocks = scheduler.blocks.num_blocks_for(len(TOKENS))
    scheduler.transfers.on_ship(ShipKV("pair", int(number), transfer_id, 0, num_blocks))
    scheduler.transfers.on_received(transfer_id, None)
    scheduler.transfers.on_finish_transfer(FinishTransfer(transfer_id, len(TOKENS), [7] * len(request.attempt_ids)))


def test_decode_schedules_a_sequence_once_its_grammar_is_compiled(decode: DecodeScheduler) -> None:
    shared, compiled = grammar()
    begin(decode, prepare(0, SAMPLING, num_sequences=2, num_generated=3), shared)
    begin(decode, prepare(1, SamplingParams()), None)
    batch, _ = decode.schedule(0.0)
    assert [item.samples[0].grammar for item in batch.items] == [None]
    decode.on_step(0.0, [ItemOutput([SampledToken(5)])])
    compiled.set_result(None)
    batch, _ = decode.schedule(0.0)
    states = [item.samples[0].grammar for item in batch.items]
    assert states[0] is not states[1] and states[2] is None  # each sequence has its own state
    assert list(batch.items[0].samples[0].output_token_ids) == [*TOKENS[-3:], 7]


def test_a_grammar_violation_fails_only_its_sequence(decode: DecodeScheduler) -> None:
    shared, compiled = grammar()
    compiled.set_result(None)
    begin(decode, prepare(0, SAMPLING), shared)
    begin(decode, prepare(1, SAMPLING), shared)
    assert len(decode.schedule(0.0)[0].items) == 2
    actions = decode.on_step(0.0, [ERROR, ItemOutput([SampledToken(5)])])
    messages = [action.message for action in actions if isinstance(action, SendToProxy)]
    [failed] = [message for message in messages if isinstance(message, AttemptFailed)]
    [tokens] = [message for message in messages if isinstance(message, TokenBatch)]
    assert (failed.attempt_id, failed.error.code) == ("r0.0", "invalid_request")
    assert [token.attempt_id for token in tokens.tokens] == ["r1.0"]
    assert len(decode.schedule(0.0)[0].items) == 1
    decode.on_step(0.0, [ItemOutput([SampledToken(0)])])
    assert decode.blocks.num_free == 20
