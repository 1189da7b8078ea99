"""Requests that wait outside of vLLM's scheduler, which knows no clients. Pure.

A prompt whose log-probabilities are wanted costs a row of logits for each token, on the host too: a step has few such
rows, and one client has half of them. A prompt with a LoRA adapter waits for the adapter's turn (`AdapterTurns`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Generic, NamedTuple, TypeVar

from tandem.prefill_worker.step import AGING_S
from tandem.vllm_worker.engine.adapter_turns import AdapterTurns

T = TypeVar("T")
ROWS_PER_PROMPT = 256
"""Tokens in a step of one prompt whose log-probabilities are wanted."""
MAX_CLIENT_ROWS = 512
"""Such tokens of one client in a step; without API keys, of all clients."""
MAX_ROWS = 1024


class Share(NamedTuple):
    """What a request takes of the steps."""

    client: str
    adapter: str | None
    num_rows: int
    """Tokens of the prompt whose log-probabilities are still to be computed."""

    @property
    def step_rows(self) -> int:
        return min(ROWS_PER_PROMPT, self.num_rows)


class HeldRequests(Generic[T]):
    """Holds requests until the steps have room for them. num_adapters: in a step."""

    def __init__(self, num_adapters: int) -> None:
        self._turns = AdapterTurns(num_adapters)
        self._held: dict[str, tuple[int, int, Share, T]] = {}
        self._numbers = itertools.count()
        self.adapters: Collection[str] = ()
        """Adapters that may compute in the next step."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, engine_id: str, priority: int, share: Share, request: T, now: float) -> None:
        """Keeps the request until `take` returns it. Waiting for AGING_S outweighs one level of priority."""
        self._held[engine_id] = priority + int(now / AGING_S), next(self._numbers), share, request

    def forget(self, engine_id: str) -> None:
        self._held.pop(engine_id, None)

    def take(self, now: float, active: Iterable[Share]) -> list[T]:
        """Returns requests that may begin, and chooses `adapters`. active: shares of those that have begun.

        Sooner priorities go first, then clients with fewer rows in the step, then older requests. None that has rows
        goes before one that waits for room, so short prompts do not keep a long one waiting.
        """
        rows: Counter[str] = Counter()
        clients_of: dict[str, set[str]] = {}
        active = list(active)
        for share in [*active, *(share for _, _, share, _ in self._held.values())]:
            if share.adapter is not None:
                clients_of.setdefault(share.adapter, set()).add(share.client)
        for share in active:
            rows[share.client] += share.step_rows
        self.adapters = self._turns.choose(now, clients_of)
        taken: list[T] = []
        is_full, full = False, set[str]()  # whether one waits for room in the step, and clients with one for their own
        by_turn = sorted(self._held.items(), key=lambda each: (each[1][0], rows[each[1][2].client], each[1][1]))
        for engine_id, (_, _, share, request) in by_turn:
            if share.adapter is not None and share.adapter not in self.adapters:
                continue
            if share.num_rows:
                if share.client in full or rows[share.client] + share.step_rows > MAX_CLIENT_ROWS:
                    full.add(share.client)
                    continue
                is_full = is_full or rows.total() + share.step_rows > MAX_ROWS
                if is_full:
                    continue
            rows[share.client] += share.step_rows
            del self._held[engine_id]
            taken.append(request)
        return taken
