"""Sequences on a decode worker, and the prompts that they share."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tandem.engine.batch import BatchItem, Sample
from tandem.engine.sampling.grammar import Grammar, GrammarState
from tandem.protocol.messages.dispatch import PrepareDecode
from tandem.protocol.messages.generation import SamplingParams
from tandem.protocol.messages.token_ids import BYTES_PER_TOKEN, unpack_token_ids
from tandem.protocol.prefix_hash import BlockHasher


@dataclass(eq=False)
class DecodePrompt:
    """What one PrepareDecode brings.

    hashes: of the prompt's full blocks. sequences: those still wanted, by attempt_id.
    """

    request: PrepareDecode
    number: int  # in order of arrival
    arrived_at: float
    hasher: BlockHasher
    hashes: list[bytes]
    sequences: dict[str, DecodeSequence] = field(default_factory=dict)
    has_begun: bool = False

    @classmethod
    def of(
        cls,
        request: PrepareDecode,
        number: int,
        now: float,
        block_size: int,
        model_id: str,
        grammar: Grammar | None = None,
    ) -> DecodePrompt:
        hasher = BlockHasher(block_size, model_id, request.cache_salt, request.media)
        prompt = cls(request, number, now, hasher, hasher.prompt_hashes(request.token_ids))
        for index, (attempt_id, seed) in enumerate(zip(request.attempt_ids, request.seeds, strict=True)):
            sampling = msgspec.structs.replace(request.sampling, seed=seed)
            state = grammar.new_state(request.stop.stop_token_ids) if grammar is not None else None
            prompt.sequences[attempt_id] = DecodeSequence(prompt, attempt_id, (number, index), sampling, state)
        return prompt

    @property
    def num_tokens(self) -> int:
        return len(self.request.token_ids) // BYTES_PER_TOKEN

    @property
    def max_num_tokens(self) -> int:
        """Positions of one sequence when it ends by length; the last token generated is never computed on."""
        request = self.request
        return self.num_tokens + request.stop.max_tokens - request.num_generated - 1

    def token_ids(self, start: int, end: int) -> list[int]:
        return unpack_token_ids(self.request.token_ids[start * BYTES_PER_TOKEN : end * BYTES_PER_TOKEN])


@dataclass(eq=False)
class DecodeSequence:
    """One sequence; all but the first five fields have a meaning once it runs.

    age: in order of arrival, less is older. num_tokens: prompt and output, the newest included, whose keys and values
    the next step computes.
    block_tokens: the tokens in the last block that have been computed; parent_hash: of the blocks before it.
    copy_from: a block, held, that the next step copies into the sequence's own last one (copy on write).
    joined_at, stepped_at: when its KV was whole, and when its first step began; the second None before that.
    """

    prompt: DecodePrompt
    attempt_id: str
    age: tuple[int, int]
    sampling: SamplingParams
    grammar: GrammarState | None = None
    block_table: list[int] = field(default_factory=list)
    num_tokens: int = 0
    position_offset: int = 0  # of its tokens' positions over their numbers, after images or video
    output_token_ids: list[int] = field(default_factory=list)  # those of earlier attempts included
    block_tokens: list[int] = field(default_factory=list)
    parent_hash: bytes = b""
    copy_from: int | None = None
    in_step: bool = False
    ended: bool = False
    joined_at: float = 0.0
    stepped_at: float | None = None
    _prompt_token_ids: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        return self.prompt.request.proxy_id, self.attempt_id

    @property
    def may_step(self) -> bool:
        """Not before its grammar is compiled."""
        return self.grammar is None or self.grammar.is_ready

    def begin(self, block_table: list[int], first_token_id: int, block_size: int, position_offset: int) -> None:
        """The prompt's KV is complete in `block_table`, which from now on is the sequence's."""
        prompt = self.prompt
        num_prompt_tokens, num_generated = prompt.num_tokens, prompt.request.num_generated
        num_before = num_prompt_tokens - num_generated
        self.block_table = block_table
        self.position_offset = position_offset
        self.num_tokens = num_prompt_tokens + 1
        self.output_token_ids = [*prompt.token_ids(num_before, num_prompt_tokens), first_token_id]
        self.block_tokens = prompt.token_ids(len(prompt.hashes) * block_size, num_prompt_tokens)
        self.parent_hash = prompt.hashes[-1] if prompt.hashes else prompt.hasher.root
        if self.sampling.has_penalties:
            self._prompt_token_ids = prompt.token_ids(0, num_before)

    def next_item(self) -> BatchItem:
        stop = self.prompt.request.stop
        sample = Sample(
            self.sampling,
            prompt_token_ids=self._prompt_token_ids,
            output_token_ids=self.output_token_ids if self.sampling.needs_history else (),
            banned_token_ids=stop.banned(len(self.output_token_ids)) if stop.min_tokens else (),
            grammar=self.grammar,
        )
        return BatchItem(
            [self.output_token_ids[-1]],
            self.num_tokens - 1,
            self.block_table,
            [sample],
            position_offset=self.position_offset,
        )

    def on_token(self, token_id: int, block_size: int) -> bytes | None:
        """A step has computed the newest token and chosen the next. Returns the hash of the block that is full now."""
        self.block_tokens.append(self.output_token_ids[-1])
        self.output_token_ids.append(token_id)
        self.num_tokens += 1
        if len(self.block_tokens) < block_size:
            return None
        number = (self.num_tokens - 2) // block_size
        self.parent_hash = self.prompt.hasher.next_hash(self.parent_hash, self.block_tokens, number)
        self.block_tokens = []
        return self.parent_hash
