"""What a request asks of the workers: sampling and stopping, and why it ended."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length"]


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one sequence is sampled. Ranges are checked by `proxy`; workers trust them.

    temperature: 0 is greedy. top_k: 0 keeps all. top_p: in (0, 1], 1 keeps all. min_p: in [0, 1], 0 keeps all.
    repetition_penalty: over prompt and output, 1 is none (Keskar et al., CTRL, 2019). presence_penalty and
    frequency_penalty: over the output, 0 is none. logit_bias: (token id, what is added to its logit).
    allowed_token_ids: when any, no others are chosen. bad_words: token sequences that are not generated.
    seed: always set; the proxy draws one where the client gave none, so noise is a function of (seed, position).
    logprobs: None for none; else the chosen token's and those of that many most likely tokens (0 to 20).
    grammar: what the output must be, see `protocol.messages.grammar`; then stop_token_ids are possible only where it
    may end.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    logprobs: int | None = None
    grammar: str | None = None

    @property
    def needs_history(self) -> bool:
        """Whether what came before changes what may be chosen."""
        return self.has_penalties or bool(self.bad_words) or self.grammar is not None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Natural logarithms of the model's own probabilities: before temperature, penalties, bias and filters.

    logprob and rank (1 is the most likely) are the token's own; top: (token id, logprob), the most likely first.
    """

    logprob: float
    rank: int
    top: list[tuple[int, float]]


class SampledToken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A token that was chosen; logprobs where `SamplingParams.logprobs` asks for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class StopConditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the workers end a sequence. Stop strings are the proxy's, which alone sees text.

    max_tokens: how many tokens may be generated, at least 1; prompt + max_tokens fits the model.
    stop_token_ids: these end the sequence (the end-of-sequence ids are among them unless the client ignores them).
    min_tokens: until so many are generated, stop_token_ids are impossible.
    """

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0

    def check(self, token_id: int, num_generated: int) -> FinishReason | None:
        """Why the sequence ends with `token_id` as its `num_generated`-th generated token, or None if it goes on."""
        if token_id in self.stop_token_ids:
            return "stop"
        return "length" if num_generated >= self.max_tokens else None

    def banned(self, num_generated: int) -> frozenset[int]:
        """What may not be chosen as the token after `num_generated` others."""
        return self.stop_token_ids if num_generated < self.min_tokens else frozenset()
