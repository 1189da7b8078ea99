"""Prompts with LoRA adapters wait for them and share no blocks with others; embeddings need no decode."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from tandem.decode_worker.decode_scheduler import Action
from tandem.engine.batch import ItemOutput
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.lora.adapter import Adapter, AdapterWeights
from tandem.handover.actions import SendToPeer, SendToProxy
from tandem.protocol.messages.checks import check_request
from tandem.protocol.messages.dispatch import AdapterRef, AttemptFailed, FirstToken, PrepareDecode, StartPrefill
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import Pooling, SampledToken, SamplingParams, StopConditions
from tandem.protocol.messages.transfer import KVRefused, ReserveKV
from tandem.runtime.errors import InvalidMessage
from tandem.worker.worker_scheduler import WorkerScheduler

REFS = [AdapterRef("a" * 64, "/a"), AdapterRef("b" * 64, "/b"), None]
TOKENS = list(range(1, 21))


def new_scheduler() -> WorkerScheduler:
    return WorkerScheduler(BlockManager(64, 8), "m", max_num_batched_tokens=16, max_num_seqs=4, lease_s=10.0)


def prompt(name: str, **fields: Any) -> StartPrefill:
    values: dict[str, Any] = {
        "proxy_id": "p", "attempt_ids": [name], "transfer_id": name, "token_ids": pack_token_ids(TOKENS),
        "sampling": SamplingParams(), "seeds": [0], "stop": StopConditions(1), "deadline_s": 9.0,
        "decode_worker_id": None, "decode_epoch": None,
    }  # fmt: skip
    return StartPrefill(**values | fields)


def messages(actions: list[Action]) -> list[Any]:
    return [action.message for action in actions if isinstance(action, SendToProxy | SendToPeer)]


def run(scheduler: WorkerScheduler, output: ItemOutput) -> list[FirstToken]:
    """Runs steps until the scheduler is idle; each item of a step gets `output`."""
    found = []
    while not scheduler.is_idle:
        batch, _ = scheduler.schedule(1.0)
        assert batch.items
        found += messages(scheduler.on_step(1.0, [output] * len(batch.items)))
    return [message for message in found if isinstance(message, FirstToken)]


def test_a_prompt_waits_for_its_adapter_and_others_do_not() -> None:
    scheduler = new_scheduler()
    loading: Future[AdapterWeights] = Future()
    adapter = Adapter(loading)
    scheduler.prefill.on_start(0.0, prompt("waits", adapter=REFS[0]), None, adapter=adapter)
    scheduler.prefill.on_start(0.0, prompt("runs"), None)
    batch, _ = scheduler.schedule(1.0)
    assert [item.adapter for item in batch.items] == [None]
    scheduler.on_step(1.0, [ItemOutput([SampledToken(1)])])
    loading.set_result(AdapterWeights({}))
    batch, _ = scheduler.schedule(1.0)
    assert adapter in [item.adapter for item in batch.items]


def test_adapters_share_no_blocks() -> None:
    scheduler = new_scheduler()
    cached = []
    for number, ref in enumerate((*REFS, *REFS)):
        scheduler.prefill.on_start(0.0, prompt(str(number), adapter=ref), None)
        [first] = run(scheduler, ItemOutput([SampledToken(1)]))
        cached.append(first.num_cached_tokens)
    assert cached == [0, 0, 0, 16, 16, 16]


@pytest.mark.parametrize("reserve_first", [True, False])
def test_decode_refuses_kv_of_another_adapter(reserve_first: bool) -> None:
    decode = new_scheduler().decode
    fields = {
        name: getattr(prompt("x"), name)
        for name in ("proxy_id", "attempt_ids", "transfer_id", "token_ids", "sampling", "seeds", "deadline_s")
    }
    prepare = PrepareDecode(**fields, stop=StopConditions(5), adapter=REFS[0], prefill_worker_id="w", prefill_epoch="e")
    reserve = ReserveKV("pair", "x", len(TOKENS), "b" * 64)
    if reserve_first:
        actions = decode.transfers.on_reserve(0.0, reserve) + decode.on_prepare(0.0, prepare)
    else:
        actions = decode.on_prepare(0.0, prepare) + decode.transfers.on_reserve(0.0, reserve)
    sent = messages(actions)
    [failed] = [message for message in sent if isinstance(message, AttemptFailed)]
    assert "another LoRA adapter" in failed.error.message
    assert reserve_first or any(isinstance(message, KVRefused) for message in sent)
    assert decode.is_idle and decode.blocks.num_free == 64


@pytest.mark.parametrize(("pooling", "cached"), [("last", 16), ("mean", 0)])
def test_an_embedding_is_the_last_state_or_the_mean_of_all_chunks(pooling: Pooling, cached: int) -> None:
    scheduler = new_scheduler()
    values = np.array([10.0, 20.0])
    for number, num_cached in enumerate((0, cached)):
        scheduler.prefill.on_start(0.0, prompt(str(number), pooling=pooling), None)
        found = []
        while not scheduler.is_idle:
            batch, _ = scheduler.schedule(1.0)
            [item] = batch.items
            assert item.samples == () or list(item.samples) == []
            sums = values if pooling == "last" else np.stack((values - 0.5, [0.5, 0.5]))
            pooled = sums.tobytes() if item.pooling is not None else None
            found += messages(scheduler.on_step(1.0, [ItemOutput([], pooled=pooled)]))
        [first] = found
        assert isinstance(first, FirstToken) and first.embedding is not None
        assert (first.finish_reason, first.num_cached_tokens) == ("length", num_cached)
        wanted = values if pooling == "last" else values * 2 / len(TOKENS)  # two chunks
        np.testing.assert_allclose(np.frombuffer(first.embedding, np.float32), wanted)
    assert scheduler.blocks.num_free == 64


def test_an_embedding_is_not_decoded() -> None:
    check_request(prompt("a", pooling="last"), 100, 100)
    with pytest.raises(InvalidMessage, match="pooling"):
        check_request(prompt("a", pooling="last", decode_worker_id="w", decode_epoch="e"), 100, 100)
