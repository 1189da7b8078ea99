"""A step that does not end is noticed, and a slow one is left alone."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import BroadcastOptions

from tandem.engine import engine_thread
from tandem.engine.batch import Batch, BatchItem
from tandem.engine.cuda.streams import end_of_work
from tandem.engine.engine_thread import EngineThread
from tandem.engine.steps.launched_step import LaunchedStep
from tandem.engine.steps.step_deadline import (
    CHECK_INTERVAL_S,
    DEVICE_TIMEOUT_S,
    DEVICE_TIMEOUT_S_PER_TOKEN,
    LAUNCH_TIMEOUT_S,
    StepDeadline,
)
from tests.support.late_device import LateDevice, install
from tests.support.late_nccl import NCCLWorld


def checks(deadline: StepDeadline, now: float, duration_s: float) -> float | None:
    """Checks at each interval. Returns when the step counted as stuck; None if it did not."""
    for _ in range(round(duration_s / CHECK_INTERVAL_S)):
        now += CHECK_INTERVAL_S
        if deadline.check(now):
            return now
    return None


def test_a_wait_for_the_device_has_a_deadline() -> None:
    deadline = StepDeadline()
    with deadline.waiting(1):
        noticed_at = checks(deadline, 0.0, 300)
    assert noticed_at is not None and DEVICE_TIMEOUT_S < noticed_at < DEVICE_TIMEOUT_S + 1
    assert checks(deadline, noticed_at, 300) is None, "an idle engine is not stuck"


def test_a_large_prompt_has_more_time_and_a_compilation_too() -> None:
    deadline = StepDeadline()
    with deadline.waiting(8192):
        assert checks(deadline, 0.0, DEVICE_TIMEOUT_S + 8000 * DEVICE_TIMEOUT_S_PER_TOKEN) is None
    with deadline.launching():
        assert checks(deadline, 1000.0, LAUNCH_TIMEOUT_S - 1) is None
        assert checks(deadline, 1000.0 + LAUNCH_TIMEOUT_S - 1, 3) is not None


def test_the_time_in_which_the_whole_process_was_stopped_does_not_count() -> None:
    deadline = StepDeadline()
    with deadline.waiting(1):
        assert not deadline.check(0.0)
        assert not deadline.check(1000.0)
        assert checks(deadline, 1000.0, DEVICE_TIMEOUT_S - 1) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4096), st.floats(0, 1)), max_size=5))
def test_steps_one_after_another_are_not_taken_for_one(steps: list[tuple[bool, int, float]]) -> None:
    deadline, now = StepDeadline(), 0.0
    for is_launch, num_tokens, share in steps:
        timeout_s = LAUNCH_TIMEOUT_S if is_launch else DEVICE_TIMEOUT_S + num_tokens * DEVICE_TIMEOUT_S_PER_TOKEN
        entered: AbstractContextManager[None] = deadline.launching() if is_launch else deadline.waiting(num_tokens)
        with entered:
            assert checks(deadline, now, share * timeout_s) is None
        now += share * timeout_s


class Rank0:
    """The engine thread of rank 0, whose steps replay a graph with a collective, and an event loop that checks it.

    Rank 1 freezes before the third step. eager: the steps are not replayed. lost: why the worker ends, and when.
    """

    def __init__(self, patch: pytest.MonkeyPatch, eager: bool) -> None:
        self.device = LateDevice(1)
        install(self.device, patch)
        patch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
        self.world = NCCLWorld(self.device)
        self.groups = [self.world("ranks", rank, 2, SimpleNamespace(_timeout=timedelta(seconds=60))) for rank in (0, 1)]
        self.lost: list[tuple[str, float]] = []
        self._posted: list[Any] = []
        self._eager = eager
        patch.setattr(engine_thread, "queue", SimpleNamespace(SimpleQueue=partial(LateQueue, self.device)))
        patch.setattr(engine_thread, "threading", SimpleNamespace(Thread=self._thread))
        patch.setattr(engine_thread, "show_thread_name", lambda: None)
        runner: Any = SimpleNamespace(warm_up=lambda: None, launch=self._launch)
        self._replay = lambda: None
        post = lambda callback, *outcome: self._posted.append(outcome)  # noqa: E731
        self.engine = EngineThread(
            lambda: runner, post, 1, lambda reason: self.lost.append((reason, self.device.now)), overlaps=True
        )

    def _thread(self, target: Any, args: Any, name: str, daemon: bool) -> Any:
        return SimpleNamespace(start=lambda: self.device.start(name, lambda: target(*args)))

    def _collective(self, rank: int) -> None:
        options = BroadcastOptions()
        options.asyncOp = False
        self.groups[rank].broadcast([torch.zeros(4)], options)

    def _step(self, rank: int) -> Any:
        """Returns what runs one step of a rank: captured, or one operation at a time."""
        self._collective(rank)  # connects
        if self._eager:
            return partial(self._collective, rank)
        graph = self.device.CUDAGraph()
        with self.device.graph(graph):
            self._collective(rank)
        return graph.replay

    def _launch(self, batch: Batch, before: Any) -> LaunchedStep:
        self._replay()
        return LaunchedStep((None, lambda tokens: []), end_of_work(torch.device("cuda", 0)))

    def run(self) -> None:
        self.device.start("rank 1", self._rank_1)
        self.device.start("events", self._serve, is_daemon=False)
        self.device.run()

    def _rank_1(self) -> None:
        with self.device.stream(self.device.new_stream()):
            step = self._step(1)
            for _ in range(2):
                step()
        self.device.wait_until(lambda: False)

    def _serve(self) -> None:
        self._replay = self._step(0)
        self.engine.start(lambda error: None)
        self.device.wait_until(lambda: bool(self._posted))
        batch = Batch([BatchItem([1] * 512, 0, [0])])
        for _ in range(3):
            self.engine.submit(batch, lambda *outcome: None)
        self.engine.submit(None, lambda *outcome: None)
        while not self.lost and not self.world.processes_ended and self.device.now < 300:
            actor, wakes_at = self.device.actor(), self.device.now + CHECK_INTERVAL_S
            assert actor is not None
            actor.wakes_at = wakes_at
            self.device.wait_until(lambda: self.device.now >= wakes_at)  # noqa: B023
            self.engine.check(self.device.now)
        self.num_done = len(self._posted) - 1


class LateQueue:
    """A queue whose reader waits on the late device."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        self._device.wait_until(lambda: bool(self._items))
        return self._items.pop(0)


def test_a_rank_that_freezes_in_a_replayed_graph_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_0 = Rank0(monkeypatch, eager=False)
    rank_0.run()
    ((reason, at),) = rank_0.lost
    assert reason == "a step has not ended in 65 s: a rank or the device is frozen; the worker ends"
    assert 65 < at < 70 and rank_0.num_done == 2
    assert not rank_0.world.processes_ended, "NCCL's watchdog does not see what a graph replays"


def test_nccls_watchdog_sees_a_collective_that_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_0 = Rank0(monkeypatch, eager=True)
    rank_0.run()
    assert rank_0.world.processes_ended and not rank_0.lost
