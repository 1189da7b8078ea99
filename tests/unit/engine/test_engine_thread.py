"""The engine thread keeps no reference to a finished step."""

from __future__ import annotations

import queue
import time
import weakref
from typing import Any

import pytest
import torch

from tandem.engine.batch import Batch, BatchItem
from tandem.engine.engine import OutOfDeviceMemory
from tandem.engine.engine_thread import EngineThread
from tandem.engine.model_runner import ModelRunner, why_lost
from tandem.engine.steps.launched_step import LaunchedStep
from tandem.engine.tensor_parallel import LeadingRunner
from tests.support.garbage import frames_in, kept_garbage


class Runner:
    device = torch.device("cpu")
    why_lost = ModelRunner.why_lost

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
    assert not frames_in("engine/engine_thread.py", garbage)
    thread.stop(60)


class FailingRunner(Runner):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def run(self, batch: Batch) -> list[Any]:
        raise self._error


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (ValueError("a mistake of the model's code"), False),
    ],
    ids=["illegal access", "out of memory", "other"],
)
def test_only_a_device_that_failed_for_good_ends_the_worker(error: Exception, is_lost: bool) -> None:
    posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    lost: list[str] = []
    runner: Any = FailingRunner(error)
    thread = EngineThread(lambda: runner, lambda callback, *outcome: posted.put(outcome), 1, lost.append)
    thread.start(lambda error: None)
    posted.get(timeout=60)
    thread.submit(a_batch(False), lambda *outcome: None)
    posted_error = posted.get(timeout=60)[1]
    if isinstance(error, torch.OutOfMemoryError):
        assert isinstance(posted_error, OutOfDeviceMemory) and str(posted_error) == str(error)
    else:
        assert posted_error is error
    thread.stop(60)
    assert bool(lost) == is_lost and all("illegal memory access" in each and "more" not in each for each in lost)


@pytest.mark.parametrize("is_late", [False, True], ids=["at its launch", "at its end"])
def test_a_step_of_several_ranks_that_fails_ends_the_worker(is_late: bool) -> None:
    class Leader(Runner):
        why_lost = LeadingRunner.why_lost

        def launch(self, batch: Batch, before: Any) -> LaunchedStep:
            if not is_late:
                raise torch.OutOfMemoryError("no room")
            return LaunchedStep((None, lambda tokens: []), self.fail)

        def fail(self) -> None:
            raise torch.OutOfMemoryError("no room")

    posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    lost: list[str] = []
    runner: Any = Leader()
    post = lambda callback, *outcome: posted.put(outcome)  # noqa: E731
    thread = EngineThread(lambda: runner, post, 1, lost.append, overlaps=True)
    thread.start(lambda error: None)
    posted.get(timeout=60)
    for batch in (a_batch(True), None):
        thread.submit(batch, lambda *outcome: None)
    assert isinstance(posted.get(timeout=60)[1], OutOfDeviceMemory)
    thread.stop(60)
    assert lost == ["the ranks are out of step; the worker ends: no room"]


def test_a_thread_that_dies_ends_the_worker() -> None:
    """It would otherwise run no step any more, but report its load."""

    class Broken(FailingRunner):
        def why_lost(self, error: BaseException) -> str:
            raise LookupError("the driver is gone")

    posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    runner: Any = Broken(ValueError("a mistake"))
    thread = EngineThread(lambda: runner, lambda callback, *outcome: posted.put(outcome), 1, lost.put)
    thread.start(lambda error: None)
    posted.get(timeout=60)
    thread.submit(a_batch(False), lambda *outcome: None)
    assert lost.get(timeout=10) == "the engine thread failed; the worker ends: the driver is gone"
    thread.stop(60)


def test_a_failed_device_is_found_behind_another_librarys_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    error = RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")
    assert why_lost(error, torch.device("cuda", 0)) == "CUDA error: unspecified launch failure"
    assert why_lost(torch.OutOfMemoryError("no room"), torch.device("cuda", 0)) == ""
    assert why_lost(error, torch.device("cpu")) == ""


def test_a_step_ends_when_the_device_is_done_even_if_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking, "it must not spin"

        def record(self, stream: str) -> None:
            happened.append(f"record on {stream}")

        def synchronize(self) -> None:
            happened.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    runner: Any = object.__new__(ModelRunner)
    runner.device = torch.device("cuda", 0)
    runner._launch = lambda batch, before: lambda _: (None, lambda tokens: happened.append("outputs") or [])
    assert ModelRunner.run(runner, Batch([BatchItem([1], 0, [0])])) == []
    assert happened == ["record on the stream of cuda:0", "synchronize", "outputs"]
