"""A prompt that the decode worker computes itself, because it is short or no prefill worker is left.

  waiting -> computing -> begun
                      \\-> ended

It waits for its blocks in the same queue as the transfers. Its chunks share steps with running sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.decode_worker.sequence import DecodePrompt
from tandem.engine.batch import BatchItem, Sample
from tandem.engine.prompt_chunks import chunk, first_samples
from tandem.engine.sampling.grammar import Grammar, GrammarState
from tandem.protocol.messages.dispatch import FirstToken
from tandem.protocol.messages.generation import SampledToken
from tandem.worker.first_tokens import first_tokens


@dataclass(eq=False)
class LocalPrefill:
    """block_table: blocks of the prompt, cached ones first. spare_block_ids: as in IncomingTransfer."""

    prompt: DecodePrompt
    token_ids: list[int]
    samples: list[Sample]
    grammar: GrammarState | None
    block_table: list[int] = field(default_factory=list)
    spare_block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0  # including cached ones
    num_cached_tokens: int = 0
    started_at: float = 0.0
    prompt_logprobs: list[bytes] = field(default_factory=list)  # packed
    in_step: bool = False
    ended: bool = False

    @classmethod
    def of(cls, prompt: DecodePrompt, grammar: Grammar | None = None) -> LocalPrefill:
        request = prompt.request
        token_ids = prompt.token_ids(0, prompt.num_tokens)
        state = grammar.new_state(request.stop.stop_token_ids) if grammar is not None else None
        samples = first_samples(request.sampling, request.seeds, request.stop, token_ids, request.num_generated, state)
        return cls(prompt, token_ids, samples, state)

    @property
    def num_remaining_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_reserved(self) -> bool:
        return bool(self.block_table)

    @property
    def may_compute(self) -> bool:
        """Whether it has its blocks and its grammar is compiled."""
        return self.is_reserved and (self.grammar is None or self.grammar.is_ready)

    def num_cacheable_blocks(self, block_size: int) -> int:
        """Returns how many blocks may come from the prefix cache. The last token is always computed, as its logits are
        needed; so are all tokens if prompt logprobs are wanted."""
        if self.prompt.request.num_prompt_logprobs is not None:
            return 0
        return (len(self.token_ids) - 1) // block_size

    def reserve(self, block_table: list[int], spare: list[int], num_cached_tokens: int) -> None:
        self.block_table, self.spare_block_ids = block_table, spare
        self.num_cached_tokens = self.num_computed_tokens = num_cached_tokens

    def first_tokens(self, now: float, tokens: list[SampledToken]) -> list[FirstToken]:
        """Returns messages for the sequences that are still wanted. tokens: one for each attempt of the request."""
        queue_s, prefill_s = self.started_at - self.prompt.arrived_at, now - self.started_at
        wanted = self.prompt.sequences
        return first_tokens(
            self.prompt.request, wanted, tokens, queue_s, prefill_s, self.prompt_logprobs, self.num_cached_tokens
        )

    def next_item(self, num_tokens: int) -> BatchItem:
        """Returns the next chunk."""
        return chunk(
            self.token_ids,
            self.num_computed_tokens,
            num_tokens,
            self.block_table,
            self.samples,
            self.prompt.request.num_prompt_logprobs,
        )


def share_out(budget: int, prefills: Iterable[LocalPrefill]) -> list[tuple[LocalPrefill, int]]:
    """Divides the next step's prompt tokens like prefill workers do: half to the oldest prompt, the rest by priority
    and then to the prompts with the fewest tokens left."""
    candidates = sorted(prefills, key=lambda p: (p.prompt.request.priority, p.num_remaining_tokens, p.prompt.number))
    if not candidates:
        return []
    first = min(candidates, key=lambda p: p.prompt.number)
    shares = {first.prompt.number: min(budget - budget // 2, first.num_remaining_tokens)}
    budget -= shares[first.prompt.number]
    for prefill in candidates:
        number = prefill.prompt.number
        share = min(budget, prefill.num_remaining_tokens - shares.get(number, 0))
        shares[number] = shares.get(number, 0) + share
        budget -= share
    return [(prefill, shares[prefill.prompt.number]) for prefill in candidates if shares[prefill.prompt.number]]
