"""Measures demand and worker speed from load reports. Pure: the caller passes the clock value.

Counters are read as differences per epoch, so workers that join, leave or restart do not disturb the sums.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tandem.protocol.messages.membership import DECODE_ROLES, PREFILL_ROLES, WorkerInfo, WorkerLoad

WINDOW_S = 8.0
"""Period over which rates are averaged."""
REMEMBERED_S = 60.0
"""Time for which the counters of a worker that is missing from the reports are kept."""
_CHANCE = 2.0
"""Standard deviations of a Poisson count that are attributed to chance."""
_REMEMBERED = 0.98
"""Weight that earlier observations of output lengths keep at each observation (half-life 34)."""
_FULL = 0.05
"""Share of free blocks below which a decode worker counts as full."""

_Loads = Sequence[tuple[WorkerInfo, WorkerLoad]]


class Demand(msgspec.Struct, frozen=True):
    """Input of the planner. Rates are means over `WINDOW_S`; the other values are those of the last report."""

    num_prefill: int = 0
    num_decode: int = 0
    prompts_per_s: float = 0.0
    """Prompts that arrive at prefill."""
    prompt_tokens_per_s: float = 0.0
    """Prompt tokens that arrive at prefill, without cached ones."""
    waiting_tokens: int = 0
    """Sum over all prefill workers."""
    waiting_prompts: int = 0
    """Sum over all prefill workers."""
    speed: float = 0.0
    """Prompt tokens per second that one prefill worker computes; 0 before the first measurement."""
    most_sequences: int = 0
    """Maximum within the window of the sum over all decode workers."""
    most_used_blocks: int = 0
    """Maximum within the window of the sum over all decode workers."""
    blocks_per_decode: int = 0
    mean_output_tokens: float = 0.0
    """Tokens generated per sequence; 0 before the first has ended."""
    fixed_step_s: float = 0.0
    """Duration of a decode step without its share per sequence, as the workers measure it; 0 before the first."""
    step_s_per_sequence: float = 0.0
    """Duration that each sequence adds to a decode step; 0 before the first."""
    decode_is_full: bool = False
    """Whether a decode worker has no free capacity, so that prompts may wait for decode instead of prefill."""
    refused_per_s: float = 0.0
    """Requests refused because too many waited."""
    growth_per_s: float = 0.0
    """Arrivals minus ends of sequences on decode if the difference is significant, else 0."""

    @property
    def predicted_ttft_s(self) -> float:
        """TTFT of a prompt of mean length that arrives now, if all prefill queues are equally long."""
        if not self.speed or not self.num_prefill:
            return 0.0
        return self.waiting_tokens / self.num_prefill / self.speed + self.mean_prompt_tokens / self.speed

    @property
    def mean_prompt_tokens(self) -> float:
        return self.prompt_tokens_per_s / self.prompts_per_s if self.prompts_per_s else 0.0

    @property
    def asked_over_served(self) -> float:
        """Ratio of demand to served prompts, at least 1; refused requests are assumed to resemble served ones."""
        return 1 + self.refused_per_s / self.prompts_per_s if self.prompts_per_s else 1.0

    def sequences_in_step(self, step_s: float) -> float:
        """Number of sequences with which a decode step takes `step_s`; infinite before the first measurement."""
        if self.step_s_per_sequence <= 0:
            return float("inf")
        return max(0.0, (step_s - self.fixed_step_s) / self.step_s_per_sequence)


class _Sample(NamedTuple):
    """One observation, summed over all workers. Counts up to `ended` run since the start; the last two are current."""

    at: float
    arrived_tokens: int
    arrived_prompts: int
    refused: int
    prefilled: int
    ended: int
    running: int
    used_blocks: int


class DemandMeter:
    """Turns load reports into `Demand`, about once a second.

    max_num_seqs: limit of one decode worker; 0 if only the worker knows it.
    """

    def __init__(self, max_num_seqs: int = 0) -> None:
        self._max_num_seqs = max_num_seqs
        self._counters: dict[str, tuple[int, int]] = {}  # epoch: computed tokens, finished prompts
        self._counted_at: dict[str, float] = {}  # epoch
        self._num_refused: int | None = None
        self._tokens = self._prompts = self._refused = 0  # summed differences
        self._samples: deque[_Sample] = deque()
        self._num_ended = 0
        self._speed = 0.0
        self._fixed_step_s = self._step_s_per_sequence = 0.0
        self._finished: dict[str, int] = {}  # epoch of a decode worker: finished sequences
        self._output_tokens = self._ended = 0.0  # with forgetting
        self._observed_at: float | None = None

    def observe(self, now: float, workers: _Loads, num_refused: int | None = None) -> Demand:
        """num_refused: requests refused by all proxies since their start; None if unknown."""
        prefills = [(info, load) for info, load in workers if info.role in PREFILL_ROLES]
        decodes = [(info, load) for info, load in workers if info.role in DECODE_ROLES]
        self._count_prompts(now, workers, num_refused)
        self._count_outputs(now, decodes)
        self._learn_speeds(prefills, decodes)
        waiting_tokens = sum(load.num_waiting_tokens for _, load in prefills)
        waiting_prompts = sum(load.num_waiting for _, load in prefills)
        new = _Sample(
            now,
            arrived_tokens=self._tokens + waiting_tokens,
            arrived_prompts=self._prompts + waiting_prompts,
            refused=self._refused,
            prefilled=self._prompts,
            ended=self._num_ended,
            # Sequences that wait on decode do not count: their prompts may still wait for prefill.
            running=sum(_num_sequences(info, load) for info, load in decodes),
            used_blocks=sum(load.num_blocks - load.num_free_blocks for _, load in decodes),
        )
        self._samples.append(new)
        while len(self._samples) > 2 and self._samples[1].at <= now - WINDOW_S:
            self._samples.popleft()
        old = self._samples[0]
        duration_s = now - old.at
        came, ended = new.prefilled - old.prefilled, new.ended - old.ended

        def rate(count: float) -> float:
            return max(0.0, count / duration_s) if duration_s > 0 else 0.0

        return Demand(
            num_prefill=len(prefills),
            num_decode=len(decodes),
            prompts_per_s=rate(new.arrived_prompts - old.arrived_prompts),
            prompt_tokens_per_s=rate(new.arrived_tokens - old.arrived_tokens),
            waiting_tokens=waiting_tokens,
            waiting_prompts=waiting_prompts,
            speed=self._speed,
            most_sequences=max(sample.running for sample in self._samples),
            most_used_blocks=max(sample.used_blocks for sample in self._samples),
            blocks_per_decode=min((load.num_blocks for _, load in decodes), default=0),
            mean_output_tokens=self._output_tokens / self._ended if self._ended > 0.5 else 0.0,
            fixed_step_s=self._fixed_step_s,
            step_s_per_sequence=self._step_s_per_sequence,
            decode_is_full=any(self._is_full(load) for _, load in decodes),
            refused_per_s=rate(new.refused - old.refused),
            growth_per_s=rate(came - ended - _CHANCE * math.sqrt(came + ended)),
        )

    def _count_prompts(self, at: float, workers: _Loads, num_refused: int | None) -> None:
        """Remembers the counters of all roles, since a worker may take another one, and those of workers that are
        missing from a report, since they may be back in the next.

        Prompts count where they are computed, not where their KV is received.
        """
        is_first = not self._counters
        for info, load in workers:
            num_tokens = load.num_prompt_tokens - load.num_cached_tokens - load.num_received_tokens
            now = (num_tokens, load.num_finished - load.num_received)
            before = self._counters.get(info.epoch, now if is_first else (0, 0))
            if info.role in PREFILL_ROLES:
                self._tokens += now[0] - before[0]
                self._prompts += max(0, now[1] - before[1])
            self._counters[info.epoch] = now
            self._counted_at[info.epoch] = at
        for epoch in [epoch for epoch, seen_at in self._counted_at.items() if at - seen_at > REMEMBERED_S]:
            del self._counters[epoch], self._counted_at[epoch]
        if num_refused is not None:
            if self._num_refused is not None:
                self._refused += max(0, num_refused - self._num_refused)  # a restarted proxy counts from 0
            self._num_refused = num_refused

    def _count_outputs(self, now: float, decodes: _Loads) -> None:
        """Counts generated tokens, one per sequence and step, and sequences that ended."""
        elapsed_s = now - self._observed_at if self._observed_at is not None else 0.0
        self._observed_at = now
        self._output_tokens *= _REMEMBERED
        self._ended *= _REMEMBERED
        for info, load in decodes:
            num_ended = load.num_finished - load.num_shipped
            ended = max(0, num_ended - self._finished.get(info.epoch, num_ended))
            self._ended += ended
            self._num_ended += ended
            if load.step_time_s > 0:
                self._output_tokens += _num_sequences(info, load) * elapsed_s / load.step_time_s
        self._finished = {info.epoch: load.num_finished - load.num_shipped for info, load in decodes}

    def _is_full(self, load: WorkerLoad) -> bool:
        return 0 < self._max_num_seqs <= load.num_running or load.num_free_blocks < _FULL * load.num_blocks

    def _learn_speeds(self, prefills: _Loads, decodes: _Loads) -> None:
        measured = [load.prompt_tokens_per_s for _, load in prefills if load.prompt_tokens_per_s > 0]
        if measured:
            self._speed = sum(measured) / len(measured)
        stepped = [load for _, load in decodes if load.fixed_step_s + load.step_s_per_sequence > 0]
        if stepped:
            self._fixed_step_s = sum(load.fixed_step_s for load in stepped) / len(stepped)
            self._step_s_per_sequence = sum(load.step_s_per_sequence for load in stepped) / len(stepped)


def _num_sequences(info: WorkerInfo, load: WorkerLoad) -> int:
    """Returns the number of running sequences, and of waiting ones on an elastic worker, where prompts run too."""
    return min(load.num_decoding, load.num_running) if info.role == "any" else load.num_running
