"""One prompt on a prefill worker, for the sequences that share it: what is computed, shipped and still wanted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tandem.engine.batch import BatchItem, Sample
from tandem.engine.prompt_chunks import chunk, first_samples
from tandem.engine.sampling.grammar import Grammar, GrammarState
from tandem.engine.vision.prompt_media import EncodeUnit, PromptMedia
from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.generation import TokenLogprobs
from tandem.protocol.messages.token_ids import unpack_token_ids
from tandem.protocol.prefix_hash import BlockHasher


@dataclass(eq=False)
class PrefillPrompt:
    """`pair_id` is None when nothing is to be shipped. open_ids: the attempt_ids that somebody still waits for."""

    request: StartPrefill
    pair_id: str | None
    number: int  # in order of arrival
    arrived_at: float
    token_ids: list[int]
    open_ids: set[str]
    samples: list[Sample]
    grammar: GrammarState | None
    media: PromptMedia | None = None
    started_at: float = 0.0
    num_computed_tokens: int = 0  # cached ones included
    num_cached_tokens: int = 0
    hashes: list[bytes] = field(default_factory=list)  # of the prompt's full blocks, once it has begun
    num_published_blocks: int = 0
    block_table: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reserve_sent: bool = False
    dst_block_ids: list[int] | None = None
    num_decode_cached_blocks: int = 0
    num_shipped_blocks: int = 0  # handed to the sender, or not needed by decode
    num_ships_in_flight: int = 0
    first_token_ids: list[int] | None = None
    in_step: bool = False
    ended: bool = False
    finish_sent: bool = False

    @classmethod
    def of(
        cls,
        request: StartPrefill,
        pair_id: str | None,
        number: int,
        now: float,
        grammar: Grammar | None = None,
        media: PromptMedia | None = None,
    ) -> PrefillPrompt:
        token_ids = unpack_token_ids(request.token_ids)
        state = grammar.new_state(request.stop.stop_token_ids) if grammar is not None else None
        samples = first_samples(request.sampling, request.seeds, request.stop, token_ids, request.num_generated, state)
        return cls(request, pair_id, number, now, token_ids, set(request.attempt_ids), samples, state, media)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_computed(self) -> bool:
        return self.num_computed_tokens == len(self.token_ids)

    @property
    def may_compute(self) -> bool:
        """Not before its grammar is compiled, which takes a millisecond as a rule, but may take much longer.

        Nor before its media are here, and others were asked whether they have encoded them.
        """
        return (self.grammar is None or self.grammar.is_ready) and (self.media is None or self.media.is_ready)

    @property
    def has_begun(self) -> bool:
        return bool(self.block_table)

    @property
    def deadline(self) -> float:
        return self.arrived_at + self.request.deadline_s

    def hash_blocks(self, block_size: int, model_id: str) -> list[bytes]:
        """Of all full blocks. Those after the first may be many, so it is done once, when the prompt begins."""
        request = self.request
        hasher = BlockHasher(block_size, model_id, request.cache_salt, request.media)
        self.hashes = hasher.prompt_hashes(request.token_ids)
        return self.hashes

    def next_item(self, num_tokens: int) -> BatchItem:
        """The next chunk."""
        return chunk(
            self.token_ids,
            self.num_computed_tokens,
            num_tokens,
            self.block_table,
            self.samples,
            self.request.num_prompt_logprobs,
            self.media,
        )

    def next_work(
        self, num_planned: int, limit: int, planned: Collection[EncodeUnit], may_exceed: bool
    ) -> tuple[int, list[EncodeUnit], int]:
        """How many tokens after the planned ones the step may compute, of `limit` tokens' worth of work in all.

        And the units of media that must be encoded first, and what these cost: see `PromptMedia.afford`.
        """
        start = self.num_computed_tokens + num_planned
        end = min(self.num_prompt_tokens, start + limit)
        if self.media is None:
            return end - start, [], 0
        end, units, cost = self.media.afford(start, end, limit, planned, may_exceed)
        return end - start, units, cost

    @property
    def position_offset(self) -> int:
        """Once it is computed."""
        return self.media.position_offset if self.media is not None else 0
