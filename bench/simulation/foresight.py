"""A planner that knows the trace: an upper limit for the others in `bench.simulation.autoscale`."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from bench.simulation.cluster import Speeds
from tandem.deploy.autoscale.demand import Demand
from tandem.deploy.autoscale.planner import Need, PlannerConfig, Proposal, decode_needed, prefill_needed
from tandem.deploy.planning.player import TraceRequest

MEAN_OVER_S = 10.0


class Foresight:
    """Applies the planner's sizing rules to future arrivals, and starts workers their boot time in advance."""

    def __init__(self, trace: Sequence[TraceRequest], speeds: Speeds, config: PlannerConfig) -> None:
        self.config = config
        self._boot_s = speeds.boot_s
        times = [request.at for request in trace]
        self._needs = []
        for number in range(int(trace[-1].at // MEAN_OVER_S) + 1):
            begin = number * MEAN_OVER_S
            arrivals = trace[bisect.bisect_left(times, begin) : bisect.bisect_left(times, begin + MEAN_OVER_S)]
            self._needs.append(self._needed(arrivals, speeds))

    def _needed(self, arrivals: Sequence[TraceRequest], speeds: Speeds) -> tuple[int, int]:
        if not arrivals:
            return 1, 1
        demand = Demand(
            prompts_per_s=len(arrivals) / MEAN_OVER_S,
            prompt_tokens_per_s=sum(request.num_prompt_tokens for request in arrivals) / MEAN_OVER_S,
            speed=speeds.prompt_tokens_per_s,
            most_sequences=1,
            mean_output_tokens=sum(request.num_output_tokens for request in arrivals) / len(arrivals),
            fixed_step_s=speeds.fixed_step_s,
            step_s_per_sequence=speeds.step_s_per_sequence,
        )
        return prefill_needed(demand, self.config).num_workers, decode_needed(demand, self.config).num_workers

    @property
    def at_start(self) -> tuple[int, int]:
        """Returns the numbers of workers before the first request."""
        proposal = self.propose(0.0, Demand(), 1, 1)
        return proposal.prefill, proposal.decode

    def propose(self, now: float, demand: Demand, num_prefill: int, num_decode: int, num_any: int = 0) -> Proposal:
        first = int(now // MEAN_OVER_S)
        last = int((now + self._boot_s + MEAN_OVER_S) // MEAN_OVER_S)
        coming = self._needs[first : last + 1] or [(1, 1)]
        config = self.config
        prefill = min(max(config.min_prefill, *(need[0] for need in coming)), config.max_prefill)
        decode = min(max(config.min_decode, *(need[1] for need in coming)), config.max_decode)
        if prefill + decode > config.max_workers:
            prefill = max(1, round(config.max_workers * prefill / (prefill + decode)))
            decode = config.max_workers - prefill
        return Proposal(prefill, decode, Need(prefill, "foreseen"), Need(decode, "foreseen"))
