"""How many prompt tokens a step may have on a device that was out of memory. Pure.

    as configured -> (a step does not fit) half of that step's -> (a minute without another) twice that, up to the first

What took the memory may be gone after a while: another program on the device, many long sequences, a large image. Where
it stays, each attempt to grow costs a step, so the pause before the next one is twice as long, up to an hour.
"""

from __future__ import annotations

MIN_BATCHED_TOKENS = 64
"""Steps are not made smaller than this."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 60.0, 3600.0


class ChunkLimit:
    """tokens: the limit."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.tokens = self._configured = max_num_batched_tokens
        self._pause_s = _MIN_PAUSE_S
        self._grows_at: float | None = None  # None where it need not grow, or since the last failure
        self._has_grown = False  # since the last failure

    def shrink(self, num_tokens: int) -> bool:
        """Makes the limit smaller than a step that did not fit. Returns False if it is the smallest one already."""
        if self.tokens <= MIN_BATCHED_TOKENS:
            return False
        self.tokens = max(MIN_BATCHED_TOKENS, min(num_tokens, self.tokens) // 2)
        if self._has_grown:
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        self._grows_at, self._has_grown = None, False
        return True

    def on_time(self, now: float) -> None:
        """Lets the limit grow when steps have fitted for long enough. Call before each step."""
        if self.tokens >= self._configured:
            return
        if self._grows_at is None:
            self._grows_at = now + self._pause_s
        elif now >= self._grows_at:
            self.tokens, self._has_grown = min(2 * self.tokens, self._configured), True
            self._grows_at = now + self._pause_s
