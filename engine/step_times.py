"""Measures steps, and chooses how many prompt tokens may share a step with running sequences.

A step that holds prompt tokens delays the next token of every running sequence. Chunks are therefore cut so that such
a step stays within a limit (stall-free batching: Agrawal et al., Sarathi-Serve, OSDI 2024). Pure.
"""

from __future__ import annotations

from tandem.engine.prompt_speed import PromptSpeed

DEFAULT_SLOWDOWN = 4.0
"""Without an SLO, a step with prompt tokens may take this many times as long as one without."""
_MIN_CHUNK_TOKENS = 16
"""Prompts advance by this much in each step, even if running sequences then exceed the limit."""
_LEARNING_RATE = 0.1
"""Weight of the newest step in the moving average of steps without prompt tokens."""
_MIN_PROMPT_SHARE = 0.25
"""Share of a mixed step's time that its prompt tokens took at least."""


class StepTimes:
    """slo_s: limit on a step with prompt tokens beside running sequences; 0 derives it from measured steps.

    decode_s: recent duration of a step without prompt tokens; 0 before the first.
    """

    def __init__(self, slo_s: float = 0.0) -> None:
        self._slo_s = slo_s
        self._speed = PromptSpeed()
        self.decode_s = 0.0

    def on_step(self, num_sequences: int, num_prompt_tokens: int, step_s: float) -> None:
        """Records a step that held so many running sequences and prompt tokens."""
        if num_prompt_tokens:
            decode_s = self.decode_s if num_sequences else 0.0
            self._speed.on_step(num_prompt_tokens, max(step_s - decode_s, _MIN_PROMPT_SHARE * step_s))
        elif num_sequences:
            self.decode_s += (_LEARNING_RATE if self.decode_s else 1.0) * (step_s - self.decode_s)

    @property
    def max_step_s(self) -> float:
        """Limit on a step with prompt tokens beside running sequences; 0 while nothing is measured."""
        return self._slo_s or DEFAULT_SLOWDOWN * self.decode_s

    @property
    def prompt_tokens_per_s(self) -> float:
        """Speed of prefill by itself; 0 before the first measurement."""
        return self._speed.tokens_per_s

    def mixed_tokens_per_s(self, max_tokens: int) -> float:
        """Speed of prefill in chunks of at most max_tokens beside running sequences; 0 before the first measurement."""
        if not self.prompt_tokens_per_s:
            return 0.0
        chunk = self.chunk(max_tokens)
        return chunk / (self.decode_s + chunk / self.prompt_tokens_per_s)

    def chunk(self, max_tokens: int) -> int:
        """Returns how many prompt tokens may share a step with running sequences."""
        if not self.max_step_s or not self.prompt_tokens_per_s:
            return max_tokens
        tokens = int((self.max_step_s - self.decode_s) * self.prompt_tokens_per_s)
        return min(max_tokens, max(tokens, _MIN_CHUNK_TOKENS))
