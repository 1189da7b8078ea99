"""The router's model of workers and the planner's model of queues, applied to the means of an observation. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec

from tandem.deploy.autoscale.planner import mean_wait_s
from tandem.deploy.diagnosis.observation import Observation, ObservedWorker
from tandem.proxy.cluster.worker_record import TypicalSpeed, WorkerUse


class ClusterModel:
    """Predicts waits and step times for other numbers of workers and for other settings."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self.num_prefill = len(observation.prefill_workers)
        self.num_decode = len(observation.decode_workers)

    @cached_property
    def prompt_tokens(self) -> float:
        """Mean number of tokens of a prompt that are computed."""
        return self._observation.demand.mean_prompt_tokens

    @cached_property
    def service_s(self) -> float:
        """Time of a mean prompt on a worker, beside its sequences, as the router predicts it; 0 if unknown."""
        return self.service_with()

    def service_with(self, itl_slo_s: float | None = None) -> float:
        """The same with another limit on steps that hold prompts."""
        uses = [_use_of(worker, itl_slo_s) for worker in self._observation.prefill_workers]
        times = [use.ttft_s(0, round(self.prompt_tokens)) for use in uses if use.tokens_per_s > 0]
        return sum(times) / len(times) if times else 0.0

    @cached_property
    def load(self) -> float:
        """Prompts that arrive, in workers that they keep busy."""
        demand = self._observation.demand
        return demand.asked_over_served * demand.prompts_per_s * self.service_s

    def wait_s(self, num_prefill: int) -> float:
        """Mean time that a prompt waits for one of so many workers."""
        return mean_wait_s(num_prefill, self.load, self.service_s)

    @cached_property
    def backlog_s(self) -> float:
        """Time in which the prompts that wait are computed, of a mean backlog."""
        tokens = sum(worker.mean("num_waiting_tokens") for worker in self._observation.prefill_workers)
        speed = self._observation.demand.speed
        return tokens / max(1, self.num_prefill) / speed if speed else 0.0

    def step_s(self, num_decode: int) -> float:
        """Mean duration of a decode step if the present sequences were divided among so many workers; 0 if unknown."""
        decodes = [worker for worker in self._observation.decode_workers if worker.load.fixed_step_s > 0]
        if not decodes or not num_decode:
            return 0.0
        fixed_s = _mean([worker.load.fixed_step_s for worker in decodes])
        each_s = _mean([worker.load.step_s_per_sequence for worker in decodes])
        return fixed_s + each_s * sum(worker.mean_sequences for worker in decodes) / num_decode


def _use_of(worker: ObservedWorker, itl_slo_s: float | None) -> WorkerUse:
    """Returns the worker without prompts that wait, with its mean number of sequences."""
    load = msgspec.structs.replace(worker.load, waiting_tokens=[], num_decoding=round(worker.mean_sequences))
    if itl_slo_s is not None:
        load = msgspec.structs.replace(load, itl_slo_s=itl_slo_s)
    use = WorkerUse(TypicalSpeed(0.0))
    use.on_report(load)
    return use


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
