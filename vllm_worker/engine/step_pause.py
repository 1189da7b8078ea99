"""How long the engine's thread waits for an order before the next step. Pure."""

from __future__ import annotations

MIN_PAUSE_S = 0.002
MAX_PAUSE_S = 0.1
"""Limit while requests skip steps until their client has a share of the time again."""
MAX_WAIT_S = 5.0
"""Limit while all requests wait for KV or for blocks. What ends that comes as an order; this is for what vLLM may do by
itself."""


class StepPause:
    """Grows while steps compute nothing and no order comes: requests then wait for KV, for blocks or for a grammar.

    It begins short, because vLLM takes a second step to act upon an order.
    """

    def __init__(self) -> None:
        self.pause_s = 0.0
        """Time to wait for an order."""

    def on_order(self) -> None:
        self.pause_s = 0.0

    def on_step(self, has_done: bool, waits_for_orders: bool) -> None:
        """has_done: whether the step has computed, or has given results.

        waits_for_orders: whether no request could compute later without an order.
        """
        limit_s = MAX_WAIT_S if waits_for_orders else MAX_PAUSE_S
        self.pause_s = 0.0 if has_done else min(limit_s, max(MIN_PAUSE_S, 2 * self.pause_s))
