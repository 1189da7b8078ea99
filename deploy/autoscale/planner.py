"""Proposes numbers of workers by role. Pure: demand and a clock value in, a `Proposal` out.

`prefill_needed` and `decode_needed` compute the current need: the fewest prefill workers whose queue keeps the TTFT
(Erlang C), and the fewest decode workers whose steps keep the ITL and whose pools hold the blocks. `Planner` smooths
them: up when more workers were needed for a short time, down when fewer sufficed for a long time, within limits. A role
that needs more gets the workers that the other role can spare, before new ones are started. Elastic workers do both
phases; where there are any, the planner changes only their number.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

from tandem.deploy.autoscale.demand import Demand


def wait_probability(num_servers: int, load: float) -> float:
    """Erlang C: probability that a customer waits. load: arrival rate times mean service time, in servers."""
    if load >= num_servers:
        return 1.0
    blocking = 1.0  # Erlang B by its recursion, which does not overflow
    for servers in range(1, num_servers + 1):
        blocking = load * blocking / (servers + load * blocking)
    return blocking / (1 - load / num_servers * (1 - blocking))


def late_fraction(num_servers: int, load: float, service_s: float, max_wait_s: float) -> float:
    """Fraction of customers that waits longer than `max_wait_s` before service."""
    if load >= num_servers:
        return 1.0
    if service_s <= 0:
        return 0.0
    return wait_probability(num_servers, load) * math.exp(-(num_servers - load) * max_wait_s / service_s)


def mean_wait_s(num_servers: int, load: float, service_s: float) -> float:
    """Mean time that a customer waits before service; infinite if the servers cannot keep up."""
    if load >= num_servers:
        return math.inf
    return wait_probability(num_servers, load) * service_s / (num_servers - load)


def servers_needed(load: float, service_s: float, max_wait_s: float, most_late: float, most: int) -> int:
    """Fewest servers, at most `most`, with which at most the fraction `most_late` of customers waits too long."""
    for num_servers in range(max(1, math.ceil(load)), most):
        if late_fraction(num_servers, load, service_s, max_wait_s) <= most_late:
            return num_servers
    return most


MAX_LATE_SHARE = 0.05
"""Share of the requests that may miss their latency target."""
MAX_UTILISATION = 0.8
"""Share of the time that prefill computes, and of the sequences that decode can run within the ITL."""
MAX_KV_USE = 0.8
"""Share of decode's blocks that may be in use."""
UP_AFTER_S = 3.0
DOWN_AFTER_S = 120.0
"""How long more, or fewer, workers must have been needed before a change."""
COOLDOWN_S = 5.0
"""Minimum time between changes of one role."""
SPARE_AFTER_S = 10.0
"""How long a role must have needed fewer workers before the other role gets them, which takes no time to start."""
REBALANCE_S = 30.0
"""Minimum time between two moves of workers from one role to the other at the limit, where both need more."""
CATCH_UP_S = 10.0
"""Time within which a backlog that is already too long should be worked off."""


class PlannerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Targets and limits of the planner."""

    ttft_s: float = 1.0
    """Target of the time to first token."""
    itl_s: float = 0.05
    """Target of the inter-token latency."""
    max_workers: int = 16
    """Limit on the workers of all roles together."""
    max_num_seqs: int = 64
    """Limit on the sequences of one decode worker; 0 if only the worker knows it."""
    foresee_s: float = 30.0
    """Period for which growth is extrapolated, about the time that a worker takes to start."""


class Need(msgspec.Struct, frozen=True):
    """reason: short text with the deciding figures. work: waiting and expected work, in workers."""

    num_workers: int
    reason: str
    work: float = 0.0


class Proposal(msgspec.Struct, frozen=True):
    """Numbers of workers to set now; equal to the current ones if nothing should change."""

    prefill: int
    decode: int
    prefill_need: Need
    decode_need: Need
    any: int = 0


def counts_text(prefill: int, decode: int, any_role: int) -> str:
    """Returns numbers of workers as `tandem scale` takes them, without elastic ones where there are none."""
    return f"prefill={prefill} decode={decode}" + (f" any={any_role}" if any_role else "")


def _up(count: float) -> int:
    """Rounds up; infinity becomes a large number."""
    return math.ceil(min(count, 1e6))


def prefill_needed(demand: Demand, config: PlannerConfig) -> Need:
    """Fewest prefill workers that keep the TTFT; the current number before a speed has been measured."""
    if not demand.speed:
        return Need(max(1, demand.num_prefill), "no prompt has been computed yet")
    if not demand.prompts_per_s and not demand.waiting_tokens and not demand.refused_per_s:
        return Need(1, "no prompts")
    service_s = demand.mean_prompt_tokens / demand.speed
    load = demand.asked_over_served * demand.prompt_tokens_per_s / demand.speed
    slack_s = config.ttft_s - service_s
    reason = f"{load:.2f} workers' worth of prompts, {service_s:.2f} s each"
    count = max(1, _up(load / MAX_UTILISATION))
    if slack_s > 0:
        count = max(count, servers_needed(load, service_s, slack_s, MAX_LATE_SHARE, config.max_workers - 1))
    else:
        reason += f" (longer than the TTFT of {config.ttft_s:g} s, whatever the number of workers)"
    # The queue beyond the TTFT must be worked off too, unless it waits because decode is full.
    num_prefill = max(1, demand.num_prefill)
    excess = demand.waiting_tokens - num_prefill * demand.speed * config.ttft_s
    if excess > 0 and not demand.decode_is_full:
        excess += max(0.0, load - num_prefill) * demand.speed * config.foresee_s  # grows until new workers serve
        count = max(count, _up(load + excess / (demand.speed * CATCH_UP_S)))
        reason += f", {demand.waiting_tokens} tokens wait"
    return Need(count, reason, (load + demand.waiting_tokens / demand.speed / config.foresee_s) / MAX_UTILISATION)


def decode_needed(demand: Demand, config: PlannerConfig) -> Need:
    """Fewest decode workers that keep the ITL; the current number if even a batch of one misses it."""
    if not demand.most_sequences:
        return Need(1, "no sequences")
    by_blocks = 1
    if demand.blocks_per_decode:
        by_blocks = _up(demand.most_used_blocks / (MAX_KV_USE * demand.blocks_per_decode))
        if demand.decode_is_full:
            by_blocks = max(by_blocks, demand.num_decode + 1)
    in_time = min(demand.sequences_in_step(config.itl_s), config.max_num_seqs or math.inf)
    if in_time < 1:
        most = max(1, demand.num_decode)
        reason = f"a step of one sequence takes longer than the ITL of {1000 * config.itl_s:g} ms"
        reason += ", whatever the number of workers"
        return Need(max(most, by_blocks), reason)
    in_time = max(1.0, MAX_UTILISATION * in_time)
    num_sequences = demand.most_sequences + demand.growth_per_s * config.foresee_s
    work = 0.0
    if demand.fixed_step_s + demand.step_s_per_sequence > 0:
        # Little's law: number of sequences at the current arrival rate if steps take as long as they may.
        step_s = demand.fixed_step_s + demand.step_s_per_sequence * in_time
        arriving = demand.asked_over_served * demand.prompts_per_s * demand.mean_output_tokens * step_s
        num_sequences = max(num_sequences, arriving)
        waiting = demand.waiting_prompts / config.foresee_s * demand.mean_output_tokens * step_s
        work = (arriving + waiting) / in_time
    by_time = _up(num_sequences / in_time)
    if by_blocks > by_time:
        total = demand.num_decode * demand.blocks_per_decode
        full = ", no room left" if demand.decode_is_full else ""
        return Need(by_blocks, f"{demand.most_used_blocks} of {total} blocks in use{full}", work)
    reason = f"{num_sequences:.0f} sequences, {in_time:.0f} on each keep the ITL"
    return Need(max(1, by_time), reason, work)


def elastic_needed(demand: Demand, config: PlannerConfig) -> int:
    """Returns the fewest elastic workers that keep both targets while each of them does both phases.

    Prompts get the time that the sequences leave of a step within the ITL, so they compute at that share of the speed.
    Workers of fixed roles would need no more than the sum of both needs, and elastic ones can do the same.
    """
    prefill, decode = prefill_needed(demand, config), decode_needed(demand, config)
    least = max(prefill.num_workers, decode.num_workers)
    if not prefill.work or not decode.work:  # a phase without work, or without a measurement
        return least
    most = prefill.num_workers + decode.num_workers
    for count in range(least, most):
        speed = demand.speed * _share_of_prompts(demand, config, count)
        if speed > 0:
            slower = msgspec.structs.replace(demand, speed=speed, num_prefill=count)
            if prefill_needed(slower, config).num_workers <= count:
                return count
    return most


def _share_of_prompts(demand: Demand, config: PlannerConfig, count: int) -> float:
    """Returns the share of a step within the ITL that the sequences leave to prompts if so many workers do both phases.

    The sequences are those of the current arrivals (Little's law): each takes a step for every token, and each step
    also waits for the prompts that are computed meanwhile.
    """
    tokens_per_s = demand.asked_over_served * demand.prompts_per_s * demand.mean_output_tokens
    prompts = demand.asked_over_served * demand.prompt_tokens_per_s / demand.speed
    idle = count - prompts - tokens_per_s * demand.step_s_per_sequence
    if idle <= 0:
        return 0.0
    num_sequences = tokens_per_s * demand.fixed_step_s / idle
    return 1 - (demand.fixed_step_s + demand.step_s_per_sequence * num_sequences) / config.itl_s


class _Steady:
    """Smooths the need of one role over time."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._needs: deque[tuple[float, int]] = deque()
        self._changed_at = -math.inf
        self._current: int | None = None

    def want(self, now: float, current: int, need: int) -> int:
        """Number of workers to set. current: number at present, starting workers included."""
        if self._current is not None and current != self._current:
            self._changed_at = now
        self._current = current
        self._needs.append((now, need))
        while len(self._needs) > 1 and self._needs[1][0] <= now - DOWN_AFTER_S:
            self._needs.popleft()
        limited = min(max(current, 1), self.most)
        if limited != current or now - self._changed_at < COOLDOWN_S:
            return limited
        least_recently = min(count for at, count in self._needs if at >= now - UP_AFTER_S)
        if self._covers(now, UP_AFTER_S) and least_recently > current:
            return min(need, self.most)  # the latest need: rising needs are detected late already
        if self._covers(now, DOWN_AFTER_S):
            ever = max(count for _, count in self._needs)
            if ever < current:
                return max(ever, 1)
        return current

    def spare(self, now: float, current: int) -> int:
        """Returns how many workers exceed what was needed during SPARE_AFTER_S, at least one."""
        if not self._covers(now, SPARE_AFTER_S):
            return 0
        needed = max(count for at, count in self._needs if at >= now - SPARE_AFTER_S)
        return max(0, current - max(needed, 1))

    def _covers(self, now: float, duration_s: float) -> bool:
        return self._needs[0][0] <= now - duration_s


class Planner:
    """Proposes numbers of workers; called once per observation, about once a second."""

    def __init__(self, config: PlannerConfig) -> None:
        self.config = config
        self._prefill = _Steady(config.max_workers - 1)
        self._decode = _Steady(config.max_workers - 1)
        self._any = _Steady(config.max_workers)
        self._rebalanced_at = -math.inf

    def propose(self, now: float, demand: Demand, num_prefill: int, num_decode: int, num_any: int = 0) -> Proposal:
        """num_prefill, num_decode, num_any: numbers at present by role, starting workers included."""
        prefill_need, decode_need = prefill_needed(demand, self.config), decode_needed(demand, self.config)
        if num_any:
            fixed = num_prefill + num_decode
            self._any.most = self.config.max_workers - fixed
            needed = max(1, elastic_needed(demand, self.config) - fixed)
            wanted = self._any.want(now, num_any, needed)
            return Proposal(num_prefill, num_decode, prefill_need, decode_need, wanted)
        prefill = self._prefill.want(now, num_prefill, prefill_need.num_workers)
        decode = self._decode.want(now, num_decode, decode_need.num_workers)
        if prefill > num_prefill and decode == num_decode:
            decode -= min(prefill - num_prefill, self._decode.spare(now, num_decode))
        elif decode > num_decode and prefill == num_prefill:
            prefill -= min(decode - num_decode, self._prefill.spare(now, num_prefill))
        if self.config.max_workers < prefill + decode:
            if num_prefill + num_decode >= self.config.max_workers and now - self._rebalanced_at < REBALANCE_S:
                prefill, decode = num_prefill, num_decode
            else:
                prefill, decode = self._share(prefill, decode, prefill_need, decode_need)
                if prefill < num_prefill or decode < num_decode:
                    self._rebalanced_at = now
        return Proposal(prefill, decode, prefill_need, decode_need)

    def _share(self, prefill: int, decode: int, prefill_need: Need, decode_need: Need) -> tuple[int, int]:
        """Divides `max_workers` among roles that want more together: a role gets the workers that the other leaves.

        If both want more than their share, the shares are proportional to the work of waiting and expected prompts,
        because prompts pass both roles. Workers move without waiting for DOWN_AFTER_S, since queued prompts cost more
        than idle decode workers.
        """
        config = self.config
        weights = prefill_need.work, decode_need.work
        if not all(weights):
            weights = prefill_need.num_workers, decode_need.num_workers
        share = round(config.max_workers * weights[0] / sum(weights))
        if prefill > share:
            prefill = max(share, config.max_workers - decode)
        prefill = min(max(prefill, 1), config.max_workers - 1)
        return prefill, config.max_workers - prefill
