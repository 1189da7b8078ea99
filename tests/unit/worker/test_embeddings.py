"""Embeddings are the last state or a mean, and need no decode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tandem.decode_worker.decode_scheduler import Action
from tandem.engine.batch import ItemOutput
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.handover.actions import SendToPeer, SendToProxy
from tandem.protocol.messages.checks import check_request
from tandem.protocol.messages.dispatch import FirstToken, StartPrefill
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import Pooling, SamplingParams, StopConditions
from tandem.runtime.errors import InvalidMessage
from tandem.worker.worker_scheduler import WorkerScheduler

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
