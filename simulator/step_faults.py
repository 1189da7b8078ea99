"""Steps of a simulated engine that fail: for good, or for lack of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.engine.engine import OutOfDeviceMemory
from tandem.simulator.engine import StepFailed
from tandem.worker.worker_scheduler import MIN_BATCHED_TOKENS, WorkerScheduler

if TYPE_CHECKING:
    from tandem.simulator.processes import Machine


class StepFaults:
    """The faults of one worker. name: of the worker."""

    def __init__(self, machine: Machine, name: str, scheduler: Callable[[], WorkerScheduler]) -> None:
        self._machine = machine
        self._name = name
        self._scheduler = scheduler

    def why_failed(self) -> BaseException | None:
        """Returns an error if the oldest step fails. Memory is never short for the smallest chunk of a prompt."""
        machine, shape = self._machine, self._machine.shape
        if not machine.has_faults or not (shape.step_failure_share or shape.no_memory_share):
            return None
        step, draw = self._scheduler()._steps[0], machine.timeline.rng.random()
        if draw < shape.step_failure_share:
            machine.num_failed_requests += self._num_requests()
            machine.note("%s: a step fails", self._name)
            return StepFailed("on purpose")
        is_large = step.num_prompt_tokens > MIN_BATCHED_TOKENS or not step.has_prompts
        if is_large and draw < shape.step_failure_share + shape.no_memory_share:
            machine.note("%s: a step has not enough memory", self._name)
            return OutOfDeviceMemory("on purpose")
        return None

    def _num_requests(self) -> int:
        """Returns how many prompts have a part in the oldest step."""
        scheduler = self._scheduler()
        running = scheduler.decode.running.steps
        sequences = running[0].sequences if running else []
        return len({id(each.prompt) for each in sequences}) + len(scheduler.prefill._step.prompts)
