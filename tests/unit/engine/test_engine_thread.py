"""The engine thread keeps no reference to a finished step."""

from __future__ import annotations

import queue
import time
import weakref
from typing import Any

import pytest

from tandem.engine.batch import Batch, BatchItem
from tandem.engine.engine_thread import EngineThread
from tests.support.garbage import frames_in, kept_garbage


class Runner:
    def warm_up(self) -> None: ...

    def run(self, batch: Batch) -> list[Any]:
        if batch.items:
            raise RuntimeError("no items")
        return []


class HeldBatch(Batch, frozen=True, weakref=True):
    """A batch that supports weak references."""


def a_batch(is_wrong: bool) -> HeldBatch:
    return HeldBatch([BatchItem([1], 0, [0])] if is_wrong else [])


@pytest.mark.parametrize("fails", [False, True])
def test_a_finished_step_is_not_referenced(fails: bool) -> None:
    posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    thread = EngineThread(Runner, lambda callback, *outcome: posted.put((callback, outcome)), 1)  # type: ignore[arg-type]
    thread.start(lambda error: None)
    posted.get(timeout=60)
    with kept_garbage() as garbage:
        batches = [a_batch(fails)]
        held = weakref.ref(batches[0])
        thread.submit(batches.pop(), lambda *outcome: None)
        assert posted.get(timeout=60)[1][0] == (None if fails else [])
        deadline = time.monotonic() + 60
        while held() is not None and time.monotonic() < deadline:
            time.sleep(0.001)  # the end is posted just before the reference is dropped
        assert held() is None
    assert not frames_in("engine/", garbage)
    thread.stop(60)
