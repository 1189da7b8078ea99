"""Beam search over one prompt: from the most likely next tokens of each beam to the next beams.

The scores and the order are vLLM's: a beam's log-probability divided by its length, prompt included, to the power of
`length_penalty`. Each step takes the tokens of 2 * width candidates for each beam, as transformers does, so that beams
that end do not use up the others. Beams share the tokens of their common beginning, and a candidate is a few numbers
until it is known to be among the best: a step costs width * 2 * width comparisons, and memory for `width` tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SampledToken, TokenLogprobs
from tandem.runtime.errors import InvalidRequest

MAX_BEAM_TOKENS = 2**18
"""Tokens that all beams of a request may generate together; each takes about 200 bytes of the proxy."""
MAX_STEP_TOKENS = 2**22
"""Tokens of all beams of a request, prompts included, which are sent to the workers in each step: 16 MiB."""


def check_search_size(width: int, sizes: list[tuple[int, int]]) -> None:
    """Raises InvalidRequest for a search that takes too much memory or time of the proxy.

    sizes: (tokens, max_tokens) of each prompt.
    """
    num_generated = width * sum(max_tokens for _, max_tokens in sizes)
    if num_generated > MAX_BEAM_TOKENS:
        raise InvalidRequest(
            f"use_beam_search with n = {width} could generate {num_generated} tokens; the limit for all beams together "
            f"is {MAX_BEAM_TOKENS}. Use a smaller n or max_tokens.",
            "n",
        )
    num_sent = num_generated + width * sum(num_tokens for num_tokens, _ in sizes)
    if num_sent > MAX_STEP_TOKENS:
        raise InvalidRequest(
            f"use_beam_search with n = {width} needs {num_sent} tokens for all beams and their prompts; the limit is "
            f"{MAX_STEP_TOKENS}. Use a smaller n or a shorter prompt.",
            "n",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """The last token of a beam, and the beam before it."""

    parent: Beam | None = None
    token: SampledToken | None = None
    """The last token; None before the first."""
    length: int = 0
    """Number of tokens."""
    logprob: float = 0.0
    """Log-probability of all tokens, and of the one that ended the beam."""
    end: SampledToken | None = None
    """Token that ended the beam, which is not part of it; `token` is then that of `parent`, too."""

    def backwards(self) -> Iterator[SampledToken]:
        """Yields the tokens, the last one first."""
        beam: Beam | None = self
        while beam is not None and beam.token is not None:
            yield beam.token
            beam = beam.parent

    @property
    def tokens(self) -> list[SampledToken]:
        """All tokens, without the one that ended the beam."""
        return list(self.backwards())[::-1]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """The next token of the running beam with this index. rank: 0 is the most likely."""

    index: int
    given: TokenLogprobs
    rank: int

    def token(self, num_top: int) -> SampledToken:
        token_id, logprob = self.given.top[self.rank]
        return SampledToken(token_id, TokenLogprobs(logprob, self.rank + 1, self.given.top[:num_top]))


class BeamSearch:
    """In each step the caller calls `add` for each running beam, in order, and then `advance`.

    eos_token_ids: tokens that end a beam. num_prompt_tokens: counts for the length of beams. num_top: most likely
    tokens that each token of a beam keeps for the answer.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        length_penalty: float,
        num_prompt_tokens: int,
        num_top: int = 0,
    ) -> None:
        self.max_tokens = max_tokens
        self.running = [Beam()]
        self.token_ids = [b""]  # packed, of each running beam
        self._num_top = num_top
        self._width = width
        self._eos_token_ids = eos_token_ids
        self._length_penalty = length_penalty
        self._num_prompt_tokens = num_prompt_tokens
        self._num_seen = 0  # candidates; of two that are as good, the earlier one is better
        self._num_added = 0  # running beams in this step
        # Heaps of the best `width`, the worst first: (logprob or score, -number, ...).
        self._candidates: list[tuple[float, int, _Candidate]] = []
        self._finished: list[tuple[float, int, Beam]] = []

    @staticmethod
    def num_candidates(width: int) -> int:
        """Returns how many top tokens `add` takes for each beam."""
        return 2 * width

    @property
    def is_over(self) -> bool:
        return not self.running or self.running[0].length >= self.max_tokens

    def add(self, given: TokenLogprobs) -> None:
        """Takes the most likely next tokens of the next running beam."""
        index = self._num_added
        self._num_added += 1
        beam, candidates = self.running[index], self._candidates
        for rank, (token_id, logprob) in enumerate(given.top[: self.num_candidates(self._width)]):
            self._num_seen += 1
            total = beam.logprob + logprob
            if token_id in self._eos_token_ids:
                self._finish(beam, total, _Candidate(index, given, rank))
            elif len(candidates) < self._width:
                heapq.heappush(candidates, (total, -self._num_seen, _Candidate(index, given, rank)))
            elif total > candidates[0][0]:
                heapq.heapreplace(candidates, (total, -self._num_seen, _Candidate(index, given, rank)))

    def advance(self) -> None:
        """Replaces the running beams by the best candidates."""
        assert self._num_added == len(self.running)
        running, token_ids = self.running, self.token_ids
        self.running, self.token_ids = [], []
        for total, _, candidate in sorted(self._candidates, key=lambda entry: entry[:2], reverse=True):
            beam, token = running[candidate.index], candidate.token(self._num_top)
            self.running.append(Beam(beam, token, beam.length + 1, total))
            self.token_ids.append(token_ids[candidate.index] + pack_token_ids([token.token_id]))
        self._candidates.clear()
        self._num_added = 0

    def best(self) -> list[Beam]:
        """Returns the `width` best beams, ended or not, the best first."""
        finished = [beam for _, _, beam in sorted(self._finished, key=lambda entry: entry[:2], reverse=True)]
        return sorted([*finished, *self.running], key=self._score, reverse=True)[: self._width]

    def _finish(self, beam: Beam, logprob: float, candidate: _Candidate) -> None:
        """Keeps a beam that ends, if it is among the best: a score does not change."""
        score = self._score_of(beam.length, logprob)
        if len(self._finished) < self._width or score > self._finished[0][0]:
            ended = Beam(beam.parent, beam.token, beam.length, logprob, candidate.token(self._num_top))
            heapq.heappush(self._finished, (score, -self._num_seen, ended))
            if len(self._finished) > self._width:
                heapq.heappop(self._finished)

    def _score(self, beam: Beam) -> float:
        return self._score_of(beam.length, beam.logprob)

    def _score_of(self, length: int, logprob: float) -> float:
        counted: float = max(1, self._num_prompt_tokens + length) ** self._length_penalty
        return logprob / counted
