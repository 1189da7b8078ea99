"""Which LoRA adapters compute in a step of vLLM, which has room for a few. Pure.

Clients take turns, and so do the adapters of each client: a client with many of them does not keep another's waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

TURN_S = 0.5
"""Time that an adapter keeps its place while others wait. Loading one onto a GPU takes milliseconds."""


class AdapterTurns:
    """num_slots: adapters in a step."""

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
