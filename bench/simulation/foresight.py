"""What a planner could do that knew the trace: a bound for the others in `bench.simulation.autoscale`. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from bench.simulation.cluster import Request, Speeds
from tandem.deploy.autoscale.demand import Demand
from tandem.deploy.autoscale.planner import Need, PlannerConfig, Proposal, decode_needed, prefill_needed

MEAN_OVER_S = 10.0


class Foresight:
    """Sizes by the planner's own rules for what will arrive, starts workers when they are needed less their boot time,
    and stops them when nothing that comes before others could start needs them.
    """

    def __init__(self, trace: Sequence[Request], speeds: Speeds, config: PlannerConfig) -> None:
        self.config = config
        self._boot_s = speeds.boot_s
        times = [request.at for request in trace]
        self._needs = []
        for number in range(int(trace[-1].at // MEAN_OVER_S) + 1):
            begin = number * MEAN_OVER_S
            some = trace[bisect.bisect_left(times, begin) : bisect.bisect_left(times, begin + MEAN_OVER_S)]
            self._needs.append(self._needed(some, speeds))

    def _needed(self, some: Sequence[Request], speeds: Speeds) -> tuple[int, int]:
        if not some:
            return 1, 1
        demand = Demand(
            prompts_per_s=len(some) / MEAN_OVER_S,
            prompt_tokens_per_s=sum(request.num_prompt_tokens for request in some) / MEAN_OVER_S,
            speed=speeds.prompt_tokens_per_s,
            most_sequences=1,
            mean_output_tokens=sum(request.num_output_tokens for request in some) / len(some),
            fixed_step_s=speeds.fixed_step_s,
            step_s_per_sequence=speeds.step_s_per_sequence,
        )
        return prefill_needed(demand, self.config).num_workers, decode_needed(demand, self.config).num_workers

    @property
    def at_start(self) -> tuple[int, int]:
        """Workers that are there before the first request."""
        proposal = self.propose(0.0, Demand(), 1, 1)
        return proposal.prefill, proposal.decode

    def propose(self, now: float, demand: Demand, num_prefill: int, num_decode: int) -> Proposal:
        first = int(now // MEAN_OVER_S)
        last = int((now + self._boot_s + MEAN_OVER_S) // MEAN_OVER_S)
        coming = self._needs[first : last + 1] or [(1, 1)]
        config = self.config
        prefill = min(max(config.min_prefill, *(need[0] for need in coming)), config.max_prefill)
        decode = min(max(config.min_decode, *(need[1] for need in coming)), config.max_decode)
        if config.max_workers and prefill + decode > config.max_workers:
            prefill = max(1, round(config.max_workers * prefill / (prefill + decode)))
            decode = config.max_workers - prefill
        return Proposal(prefill, decode, Need(prefill, "foreseen"), Need(decode, "foreseen"))
