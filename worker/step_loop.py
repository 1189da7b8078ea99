"""Submits the worker's steps to the engine, and passes their results to the scheduler.

Without overlap a step begins when the one before has ended and its actions have been performed. With overlap the
scheduler is asked for the next step as soon as one has been submitted, and again at the end of each step, so that the
device has the next step before it ends the running one. Stop tokens are then seen one step late.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from tandem.decode_worker.decode_scheduler import Action
from tandem.engine.batch import ItemOutput
from tandem.engine.engine import Engine, OutOfDeviceMemory, StepTiming
from tandem.runtime.errors import first_line
from tandem.telemetry.worker_metrics import WorkerMetrics
from tandem.worker.worker_scheduler import WorkerScheduler

log = logging.getLogger(__name__)


class StepLoop:
    """Runs the worker's steps, one after another or overlapped.

    clock: the event loop's. perform: performs actions, and calls `start`. on_step_end: called at the end of each step,
    before its results are handled. step_time_s: duration of the last step.
    """

    def __init__(
        self,
        scheduler: WorkerScheduler,
        engine: Engine,
        metrics: WorkerMetrics,
        clock: Callable[[], float],
        perform: Callable[[list[Action]], None],
        on_step_end: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self._perform = perform
        self._on_step_end = on_step_end
        self._num_in_flight = 0
        self._is_continuing = False  # whether a step has just ended
        self.step_time_s = 0.0

    def start(self) -> None:
        """Begins a step if none runs. Called after each event."""
        if self._num_in_flight:
            self._scheduler.decode.running.on_clock(self._clock())
            return
        batch, actions = self._scheduler.schedule(self._clock())
        if batch.items or batch.encodes:
            self._num_in_flight = 1
            self._engine.submit(batch, partial(self._on_step, self._is_continuing))
            actions = actions + self._submit_ahead()
        if actions:
            self._perform(actions)

    def _submit_ahead(self) -> list[Action]:
        """Submits the step behind the running one, or tells the engine that there is none."""
        if not self._engine.overlaps:
            return []
        assert self._num_in_flight == 1, "one step runs, and one at most waits behind it"
        batch, actions = self._scheduler.schedule_ahead(self._clock())
        is_step = bool(batch.items or batch.encodes)
        self._num_in_flight += is_step
        self._engine.submit(batch if is_step else None, partial(self._on_step, True))
        return actions

    def _on_step(
        self, follows: bool, results: list[ItemOutput] | None, error: BaseException | None, timing: StepTiming
    ) -> None:
        """follows: whether there was work for the step when the one before ended."""
        self.step_time_s = timing.step_s
        self._on_step_end()
        self._metrics.step.observe(timing.step_s)
        if follows:
            self._metrics.step_gap.observe(timing.gap_s)
            self._scheduler.step_times.on_gap(timing.gap_s)
        if results is None:
            self._num_in_flight = 0  # the engine does not run a step behind one that has failed
            actions = self._on_failure(error or RuntimeError("unknown"))
        else:
            self._num_in_flight -= 1
            actions = self._scheduler.on_step(self._clock(), results, timing.step_s)
            if self._num_in_flight:
                actions = actions + self._submit_ahead()
        self._is_continuing = True
        self._perform(actions)
        self._is_continuing = False

    def _on_failure(self, error: BaseException) -> list[Action]:
        if isinstance(error, OutOfDeviceMemory):
            log.warning(
                "a step did not fit into the device's memory; steps get smaller for a while: %s", first_line(error)
            )
            return self._scheduler.on_out_of_memory(error)
        log.error("a step failed", exc_info=error)
        return self._scheduler.on_step_failed(error)
