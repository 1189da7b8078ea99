"""Finds the member of a failed step that makes steps fail, so that it fails alone. Pure.

    a step fails -> its prompts run apart from its sequences, and what fails again in halves -> one that fails alone

A failed step leaves nothing behind: its members compute the same tokens again. So the others lose no token, and wait
for about twice the logarithm of their number, in steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tandem.decode_worker.sequence import DecodeSequence
from tandem.prefill_worker.prompt import PrefillPrompt

Member = DecodeSequence | PrefillPrompt


class StepIsolation:
    """The groups that run next, each in a step of its own, before steps hold everything again."""

    def __init__(self) -> None:
        self._groups: deque[list[Member]] = deque()

    @property
    def is_over(self) -> bool:
        return not self._groups

    def on_failed(self, sequences: Sequence[DecodeSequence], prompts: Sequence[PrefillPrompt]) -> None:
        """Divides the members of a failed step, which had several: members that have ended meanwhile count, too."""
        apart: list[list[Member]] = [[*prompts], [*sequences]]  # a new prompt is the likelier cause
        if not (prompts and sequences):
            [members] = [each for each in apart if each] or [[]]
            half = (len(members) + 1) // 2
            apart = [members[:half], members[half:]]
        self._groups.extendleft(each for each in reversed(apart) if each)

    def take(self) -> list[Member] | None:
        """Returns the members of the next step; None if it may hold everything."""
        return self._groups.popleft() if self._groups else None
