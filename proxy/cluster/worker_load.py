"""This proxy's estimate of one worker's load: the worker's last report plus what was sent since. Pure.

A report is at most a quarter of a second old and counts the sequences of all proxies. The share of the other proxies
is the report minus what this proxy had on the worker when the report came. Until the next report, every other proxy is
assumed to send as much as this one. Without that assumption all proxies would send to the worker that was idle last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tandem.protocol.messages.membership import WorkerLoad

_LEAST_SPEED_SHARE = 0.5
"""Least share of its speed at which a worker computes prompts beside any number of sequences. Workers keep to it
without an SLO (`engine/steps/step_times.py`)."""
_COMFORTABLE_SHARE = 0.6
"""Share of the ITL's SLO that decode steps may take while other workers are kept for prompts."""
_NEWEST_REPORT_WEIGHT = 0.05
"""Weight of the newest report in moving averages; at four reports per second their time constant is five seconds."""
_UNMEASURED_LOAD_COST = 0.25
"""Computed tokens that a token loaded from a tier counts as before the first load. Below 1, so that prompts go where
their prefix can be loaded, which measures the speed; above 0, so that blocks in the pool are worth more."""
_POOL_WEIGHT = 16.0
"""A full KV pool costs as much as this many running sequences when a decode worker is chosen."""


@dataclass(slots=True)
class PromptQueue:
    """Prompt tokens that a worker has yet to compute, by priority. A lower priority is computed sooner, as in vLLM.

    total: tokens at all priorities, estimated. latest: no priority value among them is higher.
    """

    total: int = 0
    latest: int = 0
    _own: Counter[int] = field(default_factory=Counter)
    _others: Counter[int] = field(default_factory=Counter)  # of the other proxies: reported, and assumed since

    @property
    def is_empty(self) -> bool:
        """Whether nothing of this proxy waits here."""
        return not self._own

    def ahead_of(self, priority: int) -> int:
        """Tokens that are computed before a new prompt of this priority."""
        if priority >= self.latest:  # the usual case: all prompts have the same priority
            return self.total
        return sum(n for count in (self._own, self._others) for level, n in count.items() if level <= priority)

    def add(self, priority: int, num_tokens: int, num_proxies: int) -> None:
        self._own[priority] += num_tokens
        self._others[priority] += num_tokens * (num_proxies - 1)
        self.total += num_tokens * num_proxies
        self.latest = max(self.latest, priority)

    def remove(self, priority: int, num_tokens: int) -> None:
        self._own[priority] -= num_tokens
        self.total -= num_tokens
        assert self._own[priority] >= 0
        if not self._own[priority]:
            del self._own[priority]

    def on_report(self, waiting_tokens: list[tuple[int, int]]) -> None:
        """waiting_tokens: (priority, tokens) of all proxies."""
        self._others = Counter({level: n - self._own[level] for level, n in waiting_tokens if n > self._own[level]})
        self.total = self._own.total() + self._others.total()
        self.latest = max((*self._own, *self._others), default=0)


@dataclass(slots=True)
class TypicalSpeed:
    """The speed assumed of workers that have measured none yet: the last that any worker reported.

    It is one object for all of them, so that no worker seems slower only because its report is older.
    """

    tokens_per_s: float


@dataclass(slots=True)
class WorkerUse:
    """Estimated use of one worker."""

    typical: TypicalSpeed
    loaded_tokens_per_s: float = 0.0
    """Speed of loading from tiers below the KV pool; 0 before the first load."""
    prompts: PromptQueue = field(default_factory=PromptQueue)
    itl_slo_s: float = 0.0
    """Limit on a step that holds prompt tokens beside sequences; 0 while it is not known."""
    num_sequences: int = 0
    """Sequences of all proxies that decode here."""
    num_free_blocks: int = 0
    """Free KV blocks, minus those promised to sequences of this proxy that have not reserved theirs yet."""
    prompt_share: float = 0.0
    """Share of the recent reports in which the worker had prompts to compute."""
    _measured_tokens_per_s: float = 0.0
    _fixed_step_s: float = 0.0
    _step_s_per_sequence: float = 0.0
    _num_blocks: int = 1
    _num_own: int = 0
    _num_promised: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Prefill speed while no sequences run."""
        return self._measured_tokens_per_s or self.typical.tokens_per_s

    @property
    def load_cost(self) -> float:
        """Computed tokens that a token loaded from a tier counts as, at most 1: workers compute what loads slower."""
        if not self.loaded_tokens_per_s:
            return _UNMEASURED_LOAD_COST
        return min(1.0, self.tokens_per_s / self.loaded_tokens_per_s)

    def ttft_s(self, priority: int, num_tokens: int) -> float:
        """Returns the seconds that the worker needs for a new prompt's tokens and for those ahead of it."""
        share = 1.0
        if self.num_sequences and self.itl_slo_s:  # chunks get what is left of each step
            share = max(_LEAST_SPEED_SHARE, 1 - self.itl_s(0) / self.itl_slo_s)
        return (self.prompts.ahead_of(priority) + num_tokens) / (share * self.tokens_per_s)

    def alone_s(self, num_tokens: int) -> float:
        """Returns the seconds that the worker would need for a prompt's tokens if it had nothing else to compute."""
        return num_tokens / self.tokens_per_s

    def itl_s(self, num_more: int) -> float:
        """Returns the seconds between tokens with num_more sequences more, without prompts; 0 if unknown."""
        return self._fixed_step_s + self._step_s_per_sequence * (self.num_sequences + num_more)

    @property
    def num_comfortable(self) -> float:
        """Sequences whose steps leave room for prompts within the SLO; 0 if unknown."""
        if not self._step_s_per_sequence:
            return 0.0
        return max(0.0, (_COMFORTABLE_SHARE * self.itl_slo_s - self._fixed_step_s) / self._step_s_per_sequence)

    def decode_cost(self, num_new_blocks: int) -> float:
        """Returns the load in sequences after `num_new_blocks` more blocks; only differences matter."""
        return self.num_sequences - _POOL_WEIGHT * (self.num_free_blocks - num_new_blocks) / self._num_blocks

    def on_report(self, load: WorkerLoad) -> None:
        self.prompts.on_report(load.waiting_tokens)
        self.prompt_share += _NEWEST_REPORT_WEIGHT * (bool(load.waiting_tokens) - self.prompt_share)
        self.num_sequences = max(load.num_decoding, self._num_own)
        self._fixed_step_s, self._step_s_per_sequence = load.fixed_step_s, load.step_s_per_sequence
        self.itl_slo_s = load.itl_slo_s
        self.loaded_tokens_per_s = load.loaded_tokens_per_s
        self._measured_tokens_per_s = load.prompt_tokens_per_s
        self.typical.tokens_per_s = self.tokens_per_s
        self._num_blocks = max(1, load.num_blocks)
        self.num_free_blocks = load.num_free_blocks - self._num_promised

    def add(self, num_sequences: int, num_blocks: int, num_proxies: int) -> None:
        """Counts sequences that are dispatched to the worker and promises them blocks."""
        self._num_own += num_sequences
        self.num_sequences += num_sequences * num_proxies
        self._num_promised += num_blocks
        self.num_free_blocks -= num_blocks

    def end_promise(self, num_blocks: int) -> None:
        """Ends a promise: the blocks are reserved, so the next report counts them, or they never will be."""
        self._num_promised -= num_blocks
        self.num_free_blocks += num_blocks
        assert self._num_promised >= 0

    def end_sequence(self) -> None:
        self._num_own -= 1
        self.num_sequences -= 1
        assert self._num_own >= 0

    @property
    def is_idle(self) -> bool:
        """Whether this proxy has nothing on the worker."""
        return not self._num_own and not self._num_promised and self.prompts.is_empty
