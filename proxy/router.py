"""Chooses a (prefill, decode) pair for each request. Pure policy: knows the registry and what this proxy has under way.

Prefill goes to the worker with the fewest prompt tokens ahead (dispatched by this proxy and not answered yet, plus what
the worker reports as waiting), decode to the peer with the fewest sequences; ties go round.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from protocol.errors import Overloaded
from protocol.membership import WorkerInfo
from proxy.registry import Registry, WorkerRecord


@dataclass(frozen=True, slots=True)
class Route:
    """decode: None when one token is all that is asked, so that there is nothing to ship."""

    prefill: WorkerInfo
    decode: WorkerInfo | None


class Router:
    """`pick` counts the prompt as under way; the caller owes one `prefill_ended`, and one `ended` for each sequence."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._prompt_tokens: Counter[str] = Counter()  # by prefill epoch: dispatched, first token not seen
        self._sequences: Counter[str] = Counter()  # by decode epoch
        self._picked_at: dict[str, int] = {}  # by epoch: the number of the pick that chose it last
        self._num_picks = 0

    def pick(self, num_prompt_tokens: int, num_sequences: int, needs_decode: bool) -> Route:
        """Raises Overloaded, which says what is missing, when no pair can take the request."""
        registry = self._registry
        candidates = [r for r in registry.prefill_workers if r.decode_peers or not needs_decode]
        if not candidates:
            raise Overloaded(registry.why_not_ready() or "no prefill worker is ready")
        self._num_picks += 1
        prefill = min(candidates, key=self._prefill_order)
        decode = min(prefill.decode_peers, key=self._decode_order) if needs_decode else None
        self._prompt_tokens[prefill.worker.epoch] += num_prompt_tokens
        self._picked_at[prefill.worker.epoch] = self._num_picks
        if decode is not None:
            self._sequences[decode.worker.epoch] += num_sequences
            self._picked_at[decode.worker.epoch] = self._num_picks
        return Route(prefill.worker, decode.worker if decode is not None else None)

    def prefill_ended(self, route: Route, num_prompt_tokens: int) -> None:
        """The first token came, or never will."""
        _subtract(self._prompt_tokens, route.prefill.epoch, num_prompt_tokens)

    def ended(self, route: Route) -> None:
        if route.decode is not None:
            _subtract(self._sequences, route.decode.epoch, 1)

    def forget(self, worker: WorkerInfo) -> None:
        """The worker is lost. What is still owed for it is paid into nothing."""
        for counts in (self._prompt_tokens, self._sequences, self._picked_at):
            counts.pop(worker.epoch, None)

    def _prefill_order(self, record: WorkerRecord) -> tuple[int, int]:
        epoch = record.worker.epoch
        return self._prompt_tokens[epoch] + record.load.num_waiting_tokens, self._picked_at.get(epoch, 0)

    def _decode_order(self, record: WorkerRecord) -> tuple[int, int]:
        return self._sequences[record.worker.epoch], self._picked_at.get(record.worker.epoch, 0)


def _subtract(counts: Counter[str], epoch: str, amount: int) -> None:
    remaining = counts[epoch] - amount
    if remaining > 0:
        counts[epoch] = remaining
    else:
        counts.pop(epoch, None)
