"""A prefill worker computes prompts by priority, and none starves."""

from __future__ import annotations

import math
from zlib import crc32

from tandem.engine.batch import ItemOutput
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.prefill_worker.step import AGING_S
from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tandem.worker.worker_scheduler import WorkerScheduler


class PrefillOnly:
    """Computes 8 tokens per step of 0.1 s. Requests ask for one token."""

    def __init__(self) -> None:
        self.scheduler = WorkerScheduler(BlockManager(1000, 4), "m", 8, 100, lease_s=math.inf).prefill
        self.now = 0.0
        self.done: list[str] = []

    def start(self, name: str, num_tokens: int, priority: int = 0) -> None:
        ids = pack_token_ids([crc32(name.encode()) % 2**30 + i for i in range(num_tokens)])  # no shared prefix
        request = StartPrefill(
            "proxy",
            [name],
            name,
            ids,
            SamplingParams(),
            [0],
            StopConditions(1),
            1e9,
            decode_worker_id=None,
            decode_epoch=None,
            priority=priority,
        )
        assert self.scheduler.on_start(self.now, request, None) == []

    def step(self) -> None:
        batch, _ = self.scheduler.schedule(self.now)
        self.now += 0.1
        outputs = [ItemOutput([SampledToken(1) for _ in item.samples]) for item in batch.items]
        for action in self.scheduler.on_step(self.now, outputs):
            self.done.append(action.message.attempt_id)


def test_sooner_priorities_run_first() -> None:
    worker = PrefillOnly()
    worker.start("normal", 8)
    worker.start("late", 8, priority=3)
    worker.start("soon", 8, priority=-3)
    assert worker.scheduler.prompts.waiting_tokens() == [(-3, 8), (0, 8), (3, 8)]
    for _ in range(3):
        worker.step()
    assert worker.done == ["soon", "normal", "late"]


def test_short_prompts_overtake_long_ones_of_equal_priority() -> None:
    worker = PrefillOnly()
    worker.start("long", 80)
    worker.start("short", 4)
    worker.step()
    assert worker.done == ["short"]


def test_a_stream_of_sooner_prompts_starves_no_prompt() -> None:
    worker = PrefillOnly()
    worker.start("late", 16, priority=2)
    num_steps = 0
    while "late" not in worker.done:
        worker.start(f"soon {num_steps}", 8, priority=0)  # the worker's full capacity
        worker.step()
        num_steps += 1
        assert worker.now < 2 * AGING_S + 20, "its age outweighs the priority by now"
    assert worker.now > 2 * AGING_S, "and not before"
