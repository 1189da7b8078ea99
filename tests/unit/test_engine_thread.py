"""The thread that owns the model lets go of a step when it has run it."""

from __future__ import annotations

import queue
import time
import weakref
from typing import Any

from engine.batch import Batch
from engine.engine_thread import EngineThread


class Runner:
    def warm_up(self) -> None: ...

    def run(self, batch: Batch) -> list[Any]:
        if batch.items:
            raise RuntimeError("no items")
        return []


class HeldBatch(Batch, frozen=True, weakref=True):
    """One that weak references may lead to."""


def test_a_step_that_is_done_is_held_by_nobody() -> None:
    posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    thread = EngineThread(Runner, lambda callback, *told: posted.put((callback, told)), 1)  # type: ignore[arg-type]
    thread.start(lambda error: None)
    posted.get(timeout=60)
    batches = [HeldBatch([])]
    held = weakref.ref(batches[0])
    thread.submit(batches.pop(), lambda *told: None)
    assert posted.get(timeout=60)[1][0] == []
    deadline = time.monotonic() + 60
    while held() is not None and time.monotonic() < deadline:
        time.sleep(0.001)  # it tells of the end a moment before
    assert held() is None
    thread.stop(60)
