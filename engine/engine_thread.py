"""The one thread that owns the device. Steps go in from the loop, results come back to it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from tandem.engine.batch import Batch, ItemOutput
from tandem.engine.model_runner import ModelRunner
from tandem.runtime.threads import show_thread_name

OnDone = Callable[[list[ItemOutput] | None, BaseException | None, float], None]


class EngineThread:
    """make_runner: called on the thread. post: hands a callback to the loop (`loop.call_soon_threadsafe`)."""

    def __init__(self, make_runner: Callable[[], ModelRunner], post: Callable[..., Any], num_threads: int) -> None:
        self._make_runner = make_runner
        self._post = post
        self._num_threads = num_threads
        self._steps: queue.SimpleQueue[tuple[Batch, OnDone] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._on_ready: Callable[[BaseException | None], None] | None = None

    def start(self, on_ready: Callable[[BaseException | None], None]) -> None:
        """Make the runner and warm it up; `on_ready` is posted with None, or with what went wrong."""
        self._on_ready = on_ready
        self._thread.start()

    def submit(self, batch: Batch, on_done: OnDone) -> None:
        """Run a step; `on_done(results, error, step_time_s)` is posted once, with either results or error."""
        self._steps.put((batch, on_done))

    def stop(self, timeout_s: float) -> None:
        """No more steps; the one under way is waited for, but not longer than `timeout_s`."""
        self._steps.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        assert self._on_ready is not None
        show_thread_name()
        torch.set_num_threads(self._num_threads)
        try:
            runner = self._make_runner()
            runner.warm_up()
        except BaseException as error:
            self._post(self._on_ready, error)
            return
        self._post(self._on_ready, None)
        while (step := self._steps.get()) is not None:
            self._run_step(runner, *step)
            del step  # it would hold images, in memory that others want back, until the next one comes

    def _run_step(self, runner: ModelRunner, batch: Batch, on_done: OnDone) -> None:
        started = time.perf_counter()
        try:
            results = runner.run(batch)
        except Exception as error:  # in no variable that lasts: it holds this frame, and so the batch
            self._post(on_done, None, error, time.perf_counter() - started)
        else:
            self._post(on_done, results, None, time.perf_counter() - started)
