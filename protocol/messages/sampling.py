"""Sampling parameters, stop conditions and sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length"]
Pooling = Literal["last", "mean"]
"""How a prompt's hidden states, after the last norm, become its embedding: the last token's, or the mean of all."""


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a sequence's thinking begins and ends, as token ids. All of it follows from the generated tokens."""

    is_open: bool
    """Whether the prompt ends with the opening."""
    opening: tuple[int, ...]
    """Tokens before the thinking."""
    ending: tuple[int, ...]
    """Tokens after the thinking."""
    forced: tuple[int, ...]
    """Tokens that are generated when `max_tokens` of thinking have been."""
    max_tokens: int | None = None
    """Limit on the thinking; None for no limit."""

    def forced_token(self, output_token_ids: Sequence[int]) -> int | None:
        """Returns the token that must come next because the thinking has reached its limit, or None."""
        if self.max_tokens is None:
            return None
        start = 0 if self.is_open else len(self.opening)
        number = len(output_token_ids) - start - self.max_tokens
        if not 0 <= number < len(self.forced):
            return None
        if not self.is_open and tuple(output_token_ids[:start]) != self.opening:
            return None
        number += self._num_begun(output_token_ids[start : start + self.max_tokens])
        return self.forced[number] if number < len(self.forced) else None

    def _num_begun(self, thought: Sequence[int]) -> int:
        """Returns how many of the forced tokens these tokens end with; all of them if they contain the ending.

        A model may begin the ending at the limit and then go on with something else.
        """
        size = len(self.ending)
        for place, token_id in enumerate(thought):
            rest = tuple(thought[place : place + size])
            if token_id == self.ending[0] and rest == self.ending[: len(rest)]:
                return len(rest) if len(rest) < size else len(self.forced)
        return 0


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one sequence is sampled. The proxy checks ranges."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """In (0, 1]; 1 keeps all tokens."""
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    """In [0, 1]; 0 keeps all tokens."""
    repetition_penalty: float = 1.0
    """Over prompt and output (CTRL, 2019); 1 is none."""
    presence_penalty: float = 0.0
    """Over the output; 0 is none."""
    frequency_penalty: float = 0.0
    """Over the output; 0 is none."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value that is added to its logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these are sampled; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are not generated."""
    seed: int = 0
    logprobs: int | None = None
    """Number of top tokens to report; None reports none."""
    logprob_token_ids: tuple[int, ...] = ()
    """Reported after the sampled token in place of the most likely ones; empty reports those."""
    grammar: str | None = None
    """See `protocol.messages.grammar`."""
    is_grammar_optional: bool = False
    """Whether the sequence goes on without its grammar where a worker cannot serve it, instead of ending."""
    thinking: Thinking | None = None

    @property
    def needs_history(self) -> bool:
        """Whether earlier tokens affect sampling."""
        return self.has_penalties or bool(self.bad_words) or self.grammar is not None or self.thinking is not None

    @property
    def forced_token_ids(self) -> tuple[int, ...]:
        """Tokens that are generated when the thinking has reached its limit; empty without a limit."""
        thinking = self.thinking
        return thinking.forced if thinking is not None and thinking.max_tokens is not None else ()

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Natural logarithms of the model's probabilities, before temperature, penalties, bias and filters."""

    logprob: float
    """Log-probability of the token itself."""
    rank: int
    """Rank of the token itself; 1 is the most likely."""
    top: list[tuple[int, float]]
    """(token id, logprob), the most likely first unless `SamplingParams.logprob_token_ids` names them."""


class SampledToken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """logprobs: set if `SamplingParams.logprobs` asks for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class StopConditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the workers end a sequence. Stop strings are matched by the proxy."""

    max_tokens: int
    """Limit on generated tokens, at least 1."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence, with the end-of-sequence ids unless the client ignores them."""
    min_tokens: int = 0
    """`stop_token_ids` are not sampled before this many tokens."""

    def check(self, token_id: int, num_generated: int) -> FinishReason | None:
        """Returns why the sequence ends with `token_id` as its `num_generated`-th token, or None."""
        if token_id in self.stop_token_ids:
            return "stop"
        return "length" if num_generated >= self.max_tokens else None

    def banned(self, num_generated: int) -> frozenset[int]:
        """Returns token ids that must not be sampled after `num_generated` tokens."""
        return self.stop_token_ids if num_generated < self.min_tokens else frozenset()
