"""What this proxy believes of one worker's load: what the worker reports, and what has been sent to it since. Pure.

A report is a quarter of a second old at worst, and counts the sequences of all proxies. What the others have there is
the report less what this proxy had there when it came; what they have sent since is taken to be what this proxy has
sent since, for each of them. Without that, all proxies would send everything to the worker that looked idle last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tandem.protocol.messages.membership import WorkerLoad

POOL_WEIGHT = 16.0
"""A full pool of blocks counts as so many sequences."""


@dataclass(slots=True)
class PromptQueue:
    """Prompt tokens that a worker has to compute, by priority; less is sooner (vLLM's `priority`).

    s_per_token: as measured. total: at all priorities, estimated. latest: the last priority among them.
    """

    s_per_token: float
    total: int = 0
    latest: int = 0
    own: int = 0
    _own: Counter[int] = field(default_factory=Counter)
    _own_since: Counter[int] = field(default_factory=Counter)  # what others are taken to have sent since the report
    _others: dict[int, int] = field(default_factory=dict)

    def ahead_of(self, priority: int) -> int:
        """Tokens that are computed before a prompt of this priority which comes now."""
        if priority >= self.latest:
            return self.total  # nearly always: all have the same
        counts = (self._own, self._own_since, self._others)
        return sum(n for count in counts for level, n in count.items() if level <= priority)

    def add(self, priority: int, num_tokens: int, num_proxies: int) -> None:
        self._own[priority] += num_tokens
        self._own_since[priority] += num_tokens * (num_proxies - 1)
        self.own += num_tokens
        self.total += num_tokens * num_proxies
        self.latest = max(self.latest, priority)

    def remove(self, priority: int, num_tokens: int) -> None:
        self._own[priority] -= num_tokens
        self.own -= num_tokens
        self.total -= num_tokens
        assert self._own[priority] >= 0
        if not self._own[priority]:
            del self._own[priority]

    def on_report(self, waiting_tokens: list[tuple[int, int]]) -> None:
        self._others = {p: n - self._own[p] for p, n in waiting_tokens if n > self._own[p]}
        self._own_since.clear()
        self.total = self.own + sum(self._others.values())
        self.latest = max((*self._own, *self._others), default=0)


@dataclass(slots=True)
class WorkerUse:
    """num_sequences: of all proxies, estimated. num_free_blocks: less those promised, to own sequences that have not
    reserved theirs yet.

    busy: sequences, and the part of the pool that is in use as sequences; kept ready for the router. block_weight: what
    a block more adds to it.
    """

    prompts: PromptQueue
    num_sequences: int = 0
    num_free_blocks: int = 0
    busy: float = 0.0
    block_weight: float = 1.0
    _num_own: int = 0
    _num_promised: int = 0
    _num_blocks: int = 1

    def on_report(self, load: WorkerLoad) -> None:
        self.prompts.on_report(load.waiting_tokens)
        self.num_sequences = max(load.num_running + load.num_waiting, self._num_own)
        self._num_blocks = max(1, load.num_blocks)
        self.num_free_blocks = load.num_free_blocks - self._num_promised
        self.block_weight = POOL_WEIGHT / self._num_blocks
        self._update()

    def add(self, num_sequences: int, num_blocks: int, num_proxies: int) -> None:
        self._num_own += num_sequences
        self.num_sequences += num_sequences * num_proxies
        self._num_promised += num_blocks
        self.num_free_blocks -= num_blocks
        self._update()

    def end_promise(self, num_blocks: int) -> None:
        """They are reserved, and so in the next report, or never will be."""
        self._num_promised -= num_blocks
        self.num_free_blocks += num_blocks
        assert self._num_promised >= 0
        self._update()

    def end_sequence(self) -> None:
        self._num_own -= 1
        self.num_sequences -= 1
        assert self._num_own >= 0
        self._update()

    def _update(self) -> None:
        self.busy = self.num_sequences - self.num_free_blocks * self.block_weight

    @property
    def is_idle(self) -> bool:
        """Nothing of this proxy's own is there."""
        return not (self._num_own or self._num_promised or self.prompts.own)
