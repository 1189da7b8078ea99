"""Measures how fast a worker computes prompts."""

from __future__ import annotations

_HALF_LIFE_TOKENS = 4096
"""A measurement's weight halves after this many prompt tokens."""
_MAX_SLOWDOWN = 2.0
"""A step counts for at most this multiple of the expected time, so that one stall does not make a worker look slow."""
_MIN_TIME_SHARE = 0.25
"""Steps below this share of the remembered time count in full, so that short prompts are not clipped."""


class PromptSpeed:
    """Exponentially weighted average of prompt tokens per second. `tokens_per_s` is 0 before the second measurement.

    One step by itself is no measurement: it may have stalled, or have compiled kernels, and proxies send a worker that
    looks slow nothing that would show otherwise. So the first step only bounds how slow the second one may look.
    A worker that has really become slow shows after a few steps per factor of two.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_tokens = 0.0
        self._time_s = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self._num_tokens / self._time_s if self._num_steps > 1 else 0.0

    def on_step(self, num_tokens: int, step_time_s: float) -> None:
        """Records a step with `num_tokens` prompt tokens."""
        if not num_tokens:
            return
        if self._time_s:
            expected_s = num_tokens * self._time_s / self._num_tokens
            step_time_s = min(step_time_s, max(_MAX_SLOWDOWN * expected_s, _MIN_TIME_SHARE * self._time_s))
        remaining = 0.5 ** (num_tokens / _HALF_LIFE_TOKENS) if self._num_steps > 1 else 0.0
        self._num_tokens = self._num_tokens * remaining + num_tokens
        self._time_s = self._time_s * remaining + step_time_s
        self._num_steps += 1
