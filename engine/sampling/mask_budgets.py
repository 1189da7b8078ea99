"""How much processor time the masks of each client may take in a step, which waits for them. Pure.

All sequences of a client share it, whatever grammars they have. Sequences whose masks do not fit skip the step, and are
the first in the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

SHARE = 0.5
"""Part of the time that a client's masks may take. They are computed beside the model: a step takes longer only where
they need more than the model."""
BURST_S = 0.05
"""Most that a client may save up, and what its masks may take in a step that only it waits for."""
UNLIMITED_S = 1e6


class MaskBudgets:
    """Of one worker."""

    def __init__(self) -> None:
        self._saved_s: dict[str, float] = {}  # of clients with a grammar in the last step; may be negative
        self._last_at = 0.0

    def begin_step(self, now: float, clients: Collection[str], is_shared: bool) -> dict[str, float]:
        """Returns what the masks of each client may take in this step; nothing for one whose masks took too long.

        clients: those with a grammar in the step. is_shared: whether there are other sequences or prompts in it.
        """
        earned_s = SHARE * (now - self._last_at)
        self._last_at = now
        is_shared = is_shared or len(clients) > 1
        saved = self._saved_s
        # One that is not in this step may be back in the next, and still owes what it has taken.
        self._saved_s = {each: min(BURST_S, saved[each] + earned_s) for each in saved} | {
            each: BURST_S for each in clients if each not in saved or not is_shared
        }
        self._saved_s = {each: s for each, s in self._saved_s.items() if each in clients or s < BURST_S}
        return {each: max(0.0, self._saved_s[each]) for each in clients}

    def spend(self, cpu_s: Mapping[str, float]) -> None:
        """cpu_s: what the masks of each client have taken in this step."""
        for client, spent_s in cpu_s.items():
            self._saved_s[client] = self._saved_s.get(client, BURST_S) - spent_s


def fitting(costs_s: Iterable[float], budget_s: float) -> int:
    """Returns how many of these masks are worth beginning: at least one, unless there is no budget at all."""
    number = 0
    for cost_s in costs_s:
        if budget_s <= 0.0:
            break
        budget_s -= cost_s
        if number and budget_s < 0.0:
            break
        number += 1
    return number
