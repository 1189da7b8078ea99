"""How fast a worker computes prompts, as it measures itself. Pure."""

from __future__ import annotations

_HALF_LIFE_TOKENS = 4096
"""After so many more prompt tokens a measurement weighs half."""
_MOST_SLOWER, _MOST_OF_ALL = 2.0, 0.25
"""No step counts for more than so many times what those before it let expect, unless it is less than this part of all
the time that is remembered."""


class PromptSpeed:
    """tokens_per_s: 0 until a step with prompt tokens has run; later steps outweigh earlier ones.

    A worker that once stood still, amid a step, is not slow: no prompt would be sent to it that could show otherwise.
    One that has become slow is known after some steps for each factor of two; short prompts, which take long for each
    token, count in full.
    """

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._time_s = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self._num_tokens / self._time_s if self._time_s else 0.0

    def on_step(self, num_tokens: int, step_time_s: float) -> None:
        """num_tokens: of prompts, in this step."""
        if num_tokens:
            if self._time_s:
                expected_s = num_tokens / self.tokens_per_s
                step_time_s = min(step_time_s, max(_MOST_SLOWER * expected_s, _MOST_OF_ALL * self._time_s))
            remaining = 0.5 ** (num_tokens / _HALF_LIFE_TOKENS)
            self._num_tokens = self._num_tokens * remaining + num_tokens
            self._time_s = self._time_s * remaining + step_time_s
