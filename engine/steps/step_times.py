"""Measures steps, and chooses how many prompt tokens may share a step with running sequences.

A step that holds prompt tokens delays the next token of every running sequence. Chunks are therefore cut so that such
a step stays within a limit (stall-free batching: Agrawal et al., Sarathi-Serve, OSDI 2024). Pure.
"""

from __future__ import annotations

DEFAULT_SLOWDOWN = 5.0
"""Without an SLO, a step with prompt tokens may take this many times as long as a decode step of one sequence."""
DEFAULT_MIN_LIMIT_S = 0.02
"""Without an SLO, such a step may always take this long: 50 tokens per second are more than anyone reads."""
_MIN_CHUNK_TOKENS = 16
"""Prompts advance by this much in each step, even if running sequences then exceed the limit."""
_REMEMBERED = 0.998
"""Weight that earlier decode steps and gaps keep at each new one (half-life 346 steps)."""
_MIN_SPREAD = 0.05
"""Relative spread of batch sizes below which the slope of the step time is not measured anew."""
_PROMPTS_SHARE = 0.5
"""Without an SLO, prompts get at least this share of a step's time, however many sequences run."""
_LEAST_PROMPT_TIME_SHARE = 0.25
"""Share of a mixed step's time that its prompt tokens took at least."""


class StepTimes:
    """Model of a worker's step times.

    slo_s: limit on a step with prompt tokens beside running sequences; 0 derives it from measured steps.

    A decode step of n sequences takes fixed_s + n * s_per_sequence, fitted by least squares with exponential
    forgetting. Both are 0 before the first step. The line goes through the origin until two batch sizes were seen.
    """

    def __init__(self, slo_s: float = 0.0) -> None:
        self._slo_s = slo_s
        self._speed = PromptSpeed()
        self._sums = [0.0] * 5  # of 1, n, s, n * n and n * s over decode steps (n sequences, s seconds)
        self._gaps = [0.0] * 2  # of 1 and s over gaps of s seconds
        self.fixed_s = self.s_per_sequence = 0.0

    def on_step(self, num_sequences: int, num_prompt_tokens: int, step_s: float) -> None:
        """Records a step that held so many running sequences and prompt tokens."""
        if num_prompt_tokens:
            prompt_s = step_s - self.decode_s(num_sequences)
            self._speed.on_step(num_prompt_tokens, max(prompt_s, _LEAST_PROMPT_TIME_SHARE * step_s))
        elif num_sequences:
            self._fit(num_sequences, step_s)

    def _fit(self, num_sequences: int, step_s: float) -> None:
        terms = (1, num_sequences, step_s, num_sequences * num_sequences, num_sequences * step_s)
        self._sums = [_REMEMBERED * total + term for total, term in zip(self._sums, terms, strict=True)]
        weight, n, s, nn, ns = self._sums
        mean_n, mean_s = n / weight, s / weight
        variance = nn / weight - mean_n * mean_n
        if variance > (_MIN_SPREAD * mean_n) ** 2:
            self.s_per_sequence = max(0.0, (ns / weight - mean_n * mean_s) / variance)
        elif not self.fixed_s:
            self.s_per_sequence = mean_s / mean_n
        self.s_per_sequence = min(self.s_per_sequence, mean_s / mean_n)
        self.fixed_s = max(0.0, mean_s - self.s_per_sequence * mean_n)  # the difference may round to below 0

    def on_gap(self, gap_s: float) -> None:
        """Records the time between the end of a step and the start of the next, for which there was work already."""
        self._gaps = [_REMEMBERED * total + term for total, term in zip(self._gaps, (1, gap_s), strict=True)]

    @property
    def gap_s(self) -> float:
        """Mean of recent gaps between steps; 0 before the first."""
        weight, total_s = self._gaps
        return total_s / weight if weight else 0.0

    def decode_s(self, num_sequences: int) -> float:
        """Returns the expected duration of a step of so many sequences without prompt tokens."""
        return self.fixed_s + self.s_per_sequence * num_sequences if num_sequences else 0.0

    @property
    def itl_slo_s(self) -> float:
        """The limit on a step with prompt tokens beside few running sequences; 0 while nothing is measured."""
        step_s = self.decode_s(1)
        return self._slo_s or (max(DEFAULT_MIN_LIMIT_S, DEFAULT_SLOWDOWN * step_s) if step_s else 0.0)

    def _limit_s(self, num_sequences: int) -> float:
        """Returns the limit on a step with prompt tokens beside so many sequences."""
        return self._slo_s or max(self.itl_slo_s, self.decode_s(num_sequences) / (1 - _PROMPTS_SHARE))

    @property
    def prompt_tokens_per_s(self) -> float:
        """Speed of prefill by itself; 0 before the first measurement."""
        return self._speed.tokens_per_s

    def chunk(self, num_sequences: int, max_tokens: int) -> int:
        """Returns how many prompt tokens may share a step with so many running sequences."""
        if not num_sequences or not self.itl_slo_s or not self.prompt_tokens_per_s:
            return max_tokens
        tokens = int((self._limit_s(num_sequences) - self.decode_s(num_sequences)) * self.prompt_tokens_per_s)
        return min(max_tokens, max(tokens, _MIN_CHUNK_TOKENS))


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
