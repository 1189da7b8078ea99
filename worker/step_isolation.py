"""Finds the member of a failed step that makes steps fail, so that it fails alone. Pure.

    a step fails -> its prompts run apart from its sequences, then each half of the clients, then each half of what one
    client has -> one that fails alone

A failed step leaves nothing behind: its members compute the same tokens again, so the others lose none. Those that are
not suspected take every second step: however many members fail, they wait for one failing step at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from tandem.decode_worker.sequence import DecodeSequence
from tandem.prefill_worker.prompt import PrefillPrompt

Member = DecodeSequence | PrefillPrompt


class StepIsolation:
    """The groups that run next, each in a step of its own, before steps hold everything again."""

    def __init__(self) -> None:
        self._groups: deque[list[Member]] = deque()
        self._was_group = False  # whether the last step was that of a group

    @property
    def is_over(self) -> bool:
        return not self._groups

    def on_failed(self, sequences: Sequence[DecodeSequence], prompts: Sequence[PrefillPrompt]) -> None:
        """Divides the members of a failed step, which had several: members that have ended meanwhile count, too.

        The parts run behind the groups that wait, so that all clients are apart before those of one are divided.
        """
        members: list[Member] = [*sequences, *prompts]
        clients = sorted({each.client for each in members})
        if sequences and prompts:
            first: set[Member] = set(sequences)
        elif len(clients) > 1:
            of_first = set(clients[: len(clients) // 2])
            first = {each for each in members if each.client in of_first}
        else:
            first = set(members[: (len(members) + 1) // 2])
        for group in ([m for m in members if m in first], [m for m in members if m not in first]):
            if group:
                self._groups.append(group)

    def take(self, begun: Iterable[Member], waiting: Iterable[PrefillPrompt]) -> list[Member] | None:
        """Returns the members of the next step; None if it may hold everything.

        begun: sequences and prompts that have been in a step. waiting: prompts that have not. Every second step has the
        begun ones that are in no group, and new prompts of clients that have nothing in a group.
        """
        if not self._groups:
            self._was_group = False
            return None
        if self._was_group:
            self._was_group = False
            suspects = {each for group in self._groups for each in group}
            clients = {each.client for each in suspects}
            others: list[Member] = [each for each in begun if each not in suspects]
            others += [each for each in waiting if each.client not in clients]
            if others:
                return others
        self._was_group = True
        return self._groups.popleft()
