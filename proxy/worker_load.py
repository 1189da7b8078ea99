"""What this proxy believes of one worker's load: what the worker reports, and what has been sent to it since. Pure.

A report is a quarter of a second old at worst, and counts the sequences of all proxies. What the others have there is
the report less what this proxy had there when it came; what they have sent since is taken to be what this proxy has
sent since, for each of them. Without that, all proxies would send everything to the worker that looked idle last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from protocol.membership import WorkerLoad


@dataclass(slots=True)
class PromptQueue:
    """Prompt tokens that a worker has to compute, by priority; less is sooner (vLLM's `priority`)."""

    total: int = 0  # at all priorities, estimated
    latest: int = 0  # the last priority among them
    _own: Counter[int] = field(default_factory=Counter)
    _others: dict[int, int] = field(default_factory=dict)
    _own_since: Counter[int] = field(default_factory=Counter)
    _own_total: int = 0

    def ahead_of(self, priority: int) -> int:
        """Tokens that are computed before a prompt of this priority which comes now."""
        if priority >= self.latest:
            return self.total  # nearly always: all have the same
        levels = self._levels()
        return sum(num_tokens for level, num_tokens in levels.items() if level <= priority)

    @property
    def own(self) -> int:
        return self._own_total

    def add(self, priority: int, num_tokens: int, num_proxies: int) -> None:
        self._own[priority] += num_tokens
        self._own_since[priority] += num_tokens * (num_proxies - 1)
        self._own_total += num_tokens
        self.total += num_tokens * num_proxies
        self.latest = max(self.latest, priority)

    def remove(self, priority: int, num_tokens: int) -> None:
        self._own[priority] -= num_tokens
        self._own_total -= num_tokens
        self.total -= num_tokens
        assert self._own[priority] >= 0
        if not self._own[priority]:
            del self._own[priority]

    def report(self, waiting_tokens: list[tuple[int, int]]) -> None:
        self._others = {p: n - self._own[p] for p, n in waiting_tokens if n > self._own[p]}
        self._own_since.clear()
        self.total = self._own_total + sum(self._others.values())
        self.latest = max((*self._own, *self._others), default=0)

    def _levels(self) -> Counter[int]:
        levels = self._own + self._own_since
        levels.update(self._others)
        return levels


@dataclass(slots=True)
class WorkerUse:
    """num_sequences: of all proxies, estimated. promised_blocks: to own sequences that have not reserved theirs yet."""

    prompts: PromptQueue = field(default_factory=PromptQueue)
    num_sequences: int = 0
    promised_blocks: int = 0
    num_free_blocks: int = 0  # reported
    num_blocks: int = 1
    _num_own: int = 0

    def on_report(self, load: WorkerLoad) -> None:
        self.prompts.report(load.waiting_tokens)
        reported = load.num_running + load.num_waiting
        self.num_sequences = max(reported, self._num_own)
        self.num_free_blocks = load.num_free_blocks
        self.num_blocks = max(1, load.num_blocks)

    def add_sequences(self, number: int, num_proxies: int) -> None:
        self._num_own += number
        self.num_sequences += number * num_proxies

    def end_sequence(self) -> None:
        assert self._num_own > 0
        self._num_own -= 1
        self.num_sequences -= 1

    @property
    def is_idle(self) -> bool:
        """Nothing of this proxy's own is there."""
        return not (self._num_own or self.promised_blocks or self.prompts.own)
