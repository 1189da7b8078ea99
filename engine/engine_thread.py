"""The thread that owns the device: takes steps from the event loop and posts their results back.

A device that has failed for good ends the process: it would fail each step at once, look idle and attract all requests.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from tandem.engine.batch import Batch, ItemOutput
from tandem.engine.device_errors import why_lost
from tandem.engine.model_runner import ModelRunner
from tandem.runtime.process import end_process
from tandem.runtime.threads import show_thread_name

OnDone = Callable[[list[ItemOutput] | None, BaseException | None, float], None]
OnReady = Callable[[BaseException | None], None]


class EngineThread:
    """make_runner: called on the thread. post: hands a callback to the event loop (`loop.call_soon_threadsafe`).

    on_lost(reason): called on the thread when the device has failed for good; by default it ends the process.
    """

    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        post: Callable[..., Any],
        num_threads: int,
        on_lost: Callable[[str], None] = end_process,
    ) -> None:
        self._on_lost = on_lost
        self._make_runner = make_runner
        self._post = post
        self._num_threads = num_threads
        self._steps: queue.SimpleQueue[tuple[Batch, OnDone] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, on_ready: OnReady) -> None:
        """Starts the thread, makes the runner and warms it up. Posts `on_ready` with None or the error."""
        self._thread = threading.Thread(target=self._run, args=(on_ready,), name="engine", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch, on_done: OnDone) -> None:
        """Queue a step. Posts `on_done(results, error, step_time_s)` once, with either results or an error."""
        self._steps.put((batch, on_done))

    def stop(self, timeout_s: float) -> None:
        """Stops after the running step, and waits for at most `timeout_s`."""
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
        while self._run_next(runner):
            pass

    def _run_next(self, runner: ModelRunner) -> bool:
        """Runs one step; False at the end. No reference to the batch, and its media, remains on return."""
        step = self._steps.get()
        if step is None:
            return False
        batch, on_done = step
        started = time.perf_counter()
        try:
            results = runner.run(batch)
        except Exception as error:
            if reason := why_lost(error, runner.device):
                self._on_lost(f"the device has failed; the worker ends: {reason}")
            self._post(on_done, None, error, time.perf_counter() - started)
        else:
            self._post(on_done, results, None, time.perf_counter() - started)
        return True
