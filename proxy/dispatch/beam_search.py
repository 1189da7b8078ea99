"""Beam search over one prompt: from the most likely next tokens of each beam to the next beams.

The scores and the order are vLLM's: a beam's log-probability divided by its length, prompt included, to the power of
`length_penalty`. Each step takes the tokens of 2 * width candidates for each beam, as transformers does, so that beams
that end do not use up the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.protocol.messages.generation import SampledToken, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """tokens: without the one that ended it. logprob: of all tokens. end: the token that ended it."""

    tokens: tuple[SampledToken, ...] = ()
    logprob: float = 0.0
    end: SampledToken | None = None


class BeamSearch:
    """eos_token_ids: tokens that end a beam. num_prompt_tokens: counts for the length of beams. num_top: most likely
    tokens that each token of a beam keeps for the answer."""

    def __init__(
        self,
        width: int,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        length_penalty: float,
        num_prompt_tokens: int,
        num_top: int = 0,
    ) -> None:
        self.running = [Beam()]
        self._finished: list[Beam] = []  # the best `width`, because a score does not change
        self._num_top = num_top
        self._width = width
        self._max_tokens = max_tokens
        self._eos_token_ids = eos_token_ids
        self._length_penalty = length_penalty
        self._num_prompt_tokens = num_prompt_tokens

    @staticmethod
    def num_candidates(width: int) -> int:
        """Returns how many top tokens `advance` takes for each beam."""
        return 2 * width

    @property
    def is_over(self) -> bool:
        return not self.running or len(self.running[0].tokens) >= self._max_tokens

    def advance(self, next_tokens: Sequence[TokenLogprobs]) -> None:
        """Replaces the running beams. next_tokens: of each of them, in order."""
        extended: list[Beam] = []
        for beam, given in zip(self.running, next_tokens, strict=True):
            top, shown = given.top[: self.num_candidates(self._width)], given.top[: self._num_top]
            for rank, (token_id, logprob) in enumerate(top, start=1):
                token = SampledToken(token_id, TokenLogprobs(logprob, rank, shown))
                if token_id in self._eos_token_ids:
                    self._finished.append(Beam(beam.tokens, beam.logprob + logprob, token))
                else:
                    extended.append(Beam((*beam.tokens, token), beam.logprob + logprob))
        extended.sort(key=lambda beam: beam.logprob, reverse=True)
        self.running = extended[: self._width]
        self._finished = self._best_of(self._finished)

    def best(self) -> list[Beam]:
        """Returns the `width` best beams, ended or not, the best first."""
        return self._best_of([*self._finished, *self.running])

    def _best_of(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=self._score, reverse=True)[: self._width]

    def _score(self, beam: Beam) -> float:
        length: float = max(1, self._num_prompt_tokens + len(beam.tokens)) ** self._length_penalty
        return beam.logprob / length
