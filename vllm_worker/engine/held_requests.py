"""Requests that wait outside of vLLM's scheduler, which knows no clients. Pure.

A prompt whose log-probabilities are wanted costs a row of logits for each token, on the host too: a step has few such
rows, and one client has half of them. A prompt with a LoRA adapter waits for the adapter's turn (`AdapterTurns`).
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

from tandem.prefill_worker.step import AGING_S

T = TypeVar("T")

ROWS_PER_PROMPT = 256
"""Tokens in a step of one prompt whose log-probabilities are wanted."""

MAX_CLIENT_ROWS = 512
"""Such tokens of one client in a step; without API keys, of all clients."""

MAX_ROWS = 1024

TURN_S = 0.5
"""Time that an adapter keeps its place while others wait. Loading one onto a GPU takes milliseconds."""


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


class AdapterTurns:
    """Which LoRA adapters compute in a step of vLLM, which has room for a few.

    Clients take turns, and so do the adapters of each client: a client with many of them does not keep another's
    waiting. num_slots: adapters in a step.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._chosen: dict[str, None] = {}
        self._last_turns: dict[str, int] = {}  # in which each adapter was chosen
        self._last_choices: dict[str, int] = {}  # the turn in which an adapter was last chosen for each client
        self._number = 0
        self._ends_at = 0.0

    def choose(self, now: float, clients_of: Mapping[str, Collection[str]]) -> Collection[str]:
        """Returns the adapters that may compute. clients_of: the clients that use each adapter now.

        An adapter keeps its place until its turn ends, or until a client that has none wants one.
        """
        self._last_turns = {name: turn for name, turn in self._last_turns.items() if name in clients_of}
        kept = [name for name in self._chosen if name in clients_of]
        if len(clients_of) <= self._num_slots:
            self._chosen = dict.fromkeys(clients_of)
            return self._chosen
        clients = {client for each in clients_of.values() for client in each}
        self._last_choices = {client: turn for client, turn in self._last_choices.items() if client in clients}
        served = {client for name in kept for client in clients_of[name]}
        is_over = now >= self._ends_at
        if not is_over and len(kept) == self._num_slots and (served == clients or len(served) >= self._num_slots):
            return self._chosen
        if is_over:
            self._ends_at = now + TURN_S
        self._number += 1
        self._chosen = self._next(clients_of, clients, set() if is_over else set(kept))
        self._last_turns |= dict.fromkeys(self._chosen, self._number)
        return self._chosen

    def _next(self, clients_of: Mapping[str, Collection[str]], clients: set[str], kept: set[str]) -> dict[str, None]:
        """Chooses one adapter of each client in turn. kept: those that go first."""
        last = self._last_turns
        queues = {
            client: deque(
                sorted(
                    (name for name, users in clients_of.items() if client in users),
                    key=lambda name: (name not in kept, last.get(name, 0)),
                )
            )
            for client in sorted(clients)
        }
        by_wait = sorted(queues, key=lambda client: self._last_choices.get(client, 0))
        chosen: dict[str, None] = {}
        while len(chosen) < self._num_slots:
            for client in by_wait:
                queue = queues[client]
                while queue and queue[0] in chosen:
                    queue.popleft()
                if queue and len(chosen) < self._num_slots:
                    chosen[queue.popleft()] = None
                    self._last_choices[client] = self._number
        return chosen
