"""What a worker asks of the thread that runs its model. Imports neither torch nor threads.

`engine.engine_thread.EngineThread` implements it, and so does the engine of the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from tandem.engine.batch import Batch, ItemOutput

ENGINE_NAME = "tandem"
"""Name of Tandem's own engine, see `KVLayout` and `RegisterWorker`."""


class OutOfDeviceMemory(Exception):
    """A step did not fit into the device's memory. A smaller one may succeed."""


class StepTiming(NamedTuple):
    """Duration of a step. gap_s: from the end of the step before until this one was queued on the device."""

    step_s: float
    gap_s: float


OnDone = Callable[[list[ItemOutput] | None, BaseException | None, StepTiming], None]
OnReady = Callable[[BaseException | None], None]


class Engine(Protocol):
    """Runs the steps of one model, one after the other."""

    @property
    def overlaps(self) -> bool:
        """Whether a step may be submitted while the one before runs."""

    def submit(self, batch: Batch | None, on_done: OnDone) -> None:
        """Queues a step. Posts `on_done(results, error, timing)` once, with either results or an error.

        With overlap, each step needs a second call while it runs: the step that follows it, or None. The result is
        posted after that call. If a step fails, the one that follows it is not run, and nothing is posted for it. The
        error is `OutOfDeviceMemory` if a smaller step may succeed.
        """

    def check(self, now: float) -> None:
        """Ends the process if a step is stuck. Called on the event loop, every `step_deadline.CHECK_INTERVAL_S`."""

    def stop(self, timeout_s: float) -> None:
        """Stops after the running step, and waits for at most `timeout_s`."""
