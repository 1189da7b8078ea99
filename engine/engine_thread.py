"""The thread that owns the device: takes steps from the event loop and posts their results back.

With overlap, the loop submits each step while the one before runs, or says that none follows. The thread queues it on
the device at once, and then waits for the end of the one before. So the device never waits for the host's work
between steps. Sampling that depends on the tokens of the step before is queued when they have been read, before they
are posted. A step that fails takes the one behind it along.

A device that has failed for good ends the process: it would fail each step at once, look idle and attract all requests.
So do ranks that are out of step (`ModelRunner.why_lost`), an unexpected error on the thread itself, and a step that is
launched ahead and does not end (`step_deadline`). The thread that waits for it cannot notice that; the event loop does.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from tandem.engine.batch import Batch, ItemOutput
from tandem.engine.engine import OnDone, OnReady, OutOfDeviceMemory, StepTiming
from tandem.engine.model_runner import ModelRunner, is_out_of_memory
from tandem.engine.steps.launched_step import LaunchedStep
from tandem.engine.steps.step_deadline import StepDeadline
from tandem.runtime.errors import first_line
from tandem.runtime.processes.lifetime import end_process
from tandem.runtime.threads import show_thread_name

log = logging.getLogger(__name__)


@dataclass
class _Launched:
    """One launch of a step on the engine thread."""

    batch: Batch
    on_done: OnDone
    step: LaunchedStep | None
    """None if the launch failed with `error`."""
    error: BaseException | None
    began_at: float
    """Time when the launch began."""
    queued_at: float
    """Time when the launch ended."""

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.batch.items)


class EngineThread:
    """Implements `engine.engine.Engine` by a thread.

    make_runner: called on the thread. post: hands a callback to the event loop (`runtime.threads.post`).

    overlaps: whether steps are launched before the one before has ended; see `submit`. on_lost(reason): called on the
    thread, or by `check`, when no step can run any more; by default it ends the process. clock: in seconds.
    """

    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        post: Callable[..., Any],
        num_threads: int,
        on_lost: Callable[[str], None] = end_process,
        overlaps: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.overlaps = overlaps
        self._on_lost = on_lost
        self._make_runner = make_runner
        self._post = post
        self._num_threads = num_threads
        self._clock = clock
        self._steps: queue.SimpleQueue[tuple[Batch | None, OnDone] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._launched: _Launched | None = None
        self._ended_at: float | None = None  # the last step
        self._deadline = StepDeadline()

    def start(self, on_ready: OnReady) -> None:
        """Starts the thread, makes the runner and warms it up. Posts `on_ready` with None or the error."""
        self._thread = threading.Thread(target=self._run, args=(on_ready,), name="engine", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch | None, on_done: OnDone) -> None:
        self._steps.put((batch, on_done))

    def check(self, now: float) -> None:
        if reason := self._deadline.check(now):
            self._on_lost(f"{reason}: a rank or the device is frozen; the worker ends")

    def stop(self, timeout_s: float) -> None:
        self._is_stopping = True
        self._steps.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, on_ready: OnReady) -> None:
        show_thread_name()
        torch.set_num_threads(self._num_threads)
        try:
            runner = self._make_runner()
            runner.warm_up()
        except BaseException as error:
            self._post(on_ready, error)
            return
        self._post(on_ready, None)
        run_next = self._overlap_next if self.overlaps else self._run_next
        try:
            while run_next(runner):
                pass
        except BaseException as error:
            if not self._is_stopping:  # else the event loop may be closed already
                log.exception("the engine thread failed")
                self._on_lost(f"the engine thread failed; the worker ends: {first_line(error)}")

    def _run_next(self, runner: ModelRunner) -> bool:
        """Runs one step; False at the end. No reference to the batch, and its media, remains on return."""
        step = self._steps.get()
        if step is None:
            return False
        batch, on_done = step
        assert batch is not None
        began_at = self._clock()
        try:
            results = runner.run(batch)
        except Exception as error:
            self._fail(runner, on_done, error, began_at, began_at)
        else:
            self._post(on_done, results, None, self._end_step(began_at, began_at))
        return True

    def _overlap_next(self, runner: ModelRunner) -> bool:
        """Launches a step, then ends the one before; False at the end."""
        step = self._steps.get()
        if step is None:
            return False
        batch, on_done = step
        before, self._launched = self._launched, None
        if batch is not None and (before is None or before.error is None):
            self._launched = self._launch(runner, batch, on_done, before)
        if before is not None:
            self._finish(runner, before)
        return True

    def _launch(self, runner: ModelRunner, batch: Batch, on_done: OnDone, before: _Launched | None) -> _Launched:
        began_at = self._clock()
        try:
            with self._deadline.launching():
                step = runner.launch(batch, before.step if before is not None else None)
        except Exception as error:
            return _Launched(batch, on_done, None, error, began_at, self._clock())
        return _Launched(batch, on_done, step, None, began_at, self._clock())

    def _sample(self, launched: _Launched, before: list[ItemOutput]) -> None:
        """Queues the sampling of a step that depends on the tokens of the step before, which has ended."""
        if launched.step is None:
            return
        try:
            with self._deadline.launching():
                launched.step.sample_after(before)
        except Exception as error:
            launched.step, launched.error = None, error

    def _finish(self, runner: ModelRunner, ending: _Launched) -> None:
        """Waits for a step's end and posts its outcome."""
        if ending.step is None:
            assert ending.error is not None
            with self._deadline.waiting(ending.num_tokens):
                self._fail(runner, ending.on_done, ending.error, ending.began_at, ending.queued_at)
            return
        try:
            with self._deadline.waiting(ending.num_tokens):
                results = ending.step.result()
        except Exception as error:
            self._launched = None
            with self._deadline.waiting(ending.num_tokens):
                self._fail(runner, ending.on_done, error, ending.began_at, ending.queued_at)
            return
        after = self._launched
        if after is not None and after.step is not None and ending.step.was_corrected:
            # It has computed with tokens that are wrong. It writes the same blocks again.
            after = self._launched = self._launch(runner, after.batch, after.on_done, ending)
        if after is not None:
            self._sample(after, results)
        self._post(ending.on_done, results, None, self._end_step(ending.began_at, ending.queued_at))

    def _fail(
        self, runner: ModelRunner, on_done: OnDone, error: BaseException, began_at: float, queued_at: float
    ) -> None:
        """Posts an error, once the device does not use the step's blocks any more."""
        if reason := runner.why_lost(error):
            log.error("a step failed", exc_info=error)
            self._on_lost(reason)
        with suppress(Exception):
            runner.wait()
        if is_out_of_memory(error):
            error = OutOfDeviceMemory(first_line(error))
        self._post(on_done, None, error, self._end_step(began_at, queued_at))

    def _end_step(self, began_at: float, queued_at: float) -> StepTiming:
        """Returns the timing of the step that ends now."""
        now, before = self._clock(), self._ended_at
        self._ended_at = now
        if before is None:
            return StepTiming(now - began_at, 0.0)
        return StepTiming(now - max(began_at, before), max(0.0, queued_at - before))
