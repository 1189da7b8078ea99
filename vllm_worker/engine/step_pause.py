"""How long the engine's thread waits for an order before the next step. Pure."""

from __future__ import annotations

MIN_PAUSE_S = 0.002
MAX_PAUSE_S = 0.1
"""Whatever ends the wait of a request comes as an order; this is for what vLLM may do by itself."""


class StepPause:
    """Grows while steps compute nothing and no order comes: requests then wait for KV, for blocks or for a grammar.

    It begins short, because vLLM takes a second step to act upon an order.
    """

    def __init__(self) -> None:
        self.pause_s = 0.0
        """Time to wait for an order."""

    def on_order(self) -> None:
        self.pause_s = 0.0

    def on_step(self, has_done: bool) -> None:
        """has_done: whether the step has computed, or has given results."""
        self.pause_s = 0.0 if has_done else min(MAX_PAUSE_S, max(MIN_PAUSE_S, 2 * self.pause_s))
