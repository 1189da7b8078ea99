"""Sequences that decode, the prompts that they share, and the table of all that have not ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tandem.engine.batch import BatchItem, Sample
from tandem.engine.lora.adapter import Adapter
from tandem.engine.sampling.grammar import Grammar, GrammarState
from tandem.protocol.messages.dispatch import PromptMessage
from tandem.protocol.messages.packed import BYTES_PER_TOKEN, token_array, unpack_token_ids
from tandem.protocol.messages.sampling import SamplingParams
from tandem.protocol.prefix_hash import BlockHasher, client_of


def num_blocks_needed(request: PromptMessage, block_size: int) -> int:
    """Returns how many blocks one of the request's sequences needs to run to its end, or all of them to begin."""
    num_tokens = len(request.token_ids) // BYTES_PER_TOKEN
    num_full = num_tokens // block_size
    num_own = -(-(num_tokens + 1) // block_size) - num_full  # of each sequence, one token ahead
    # The last generated token is never computed on.
    longest = num_tokens + request.stop.max_tokens - request.num_generated - 1
    return max(-(-longest // block_size), num_full + len(request.attempt_ids) * num_own)


@dataclass(frozen=True)
class ComputedPrompt:
    """A prompt that this worker has computed and now decodes. The decode role takes over its blocks.

    open_ids: attempts that need more tokens. first_token_ids: one for each attempt of the request.
    """

    request: PromptMessage
    open_ids: set[str]
    arrived_at: float
    hashes: list[bytes]
    block_table: list[int]
    first_token_ids: list[int]
    position_offset: int
    grammar: Grammar | None
    adapter: Adapter | None = None


@dataclass(eq=False)
class DecodePrompt:
    """A prompt that its sequences share.

    hashes: of the prompt's full blocks. sequences: those still wanted, by attempt_id.
    """

    request: PromptMessage
    number: int  # in order of arrival
    arrived_at: float
    hasher: BlockHasher
    hashes: list[bytes]
    sequences: dict[str, DecodeSequence] = field(default_factory=dict)
    adapter: Adapter | None = None
    cached_block_ids: list[int] = field(default_factory=list)
    """First blocks of the prompt, which the prefix cache had. Empty once it has begun or ended."""
    spare_block_ids: list[int] = field(default_factory=list)
    """Reserved blocks for the first tokens after the prompt, and for copies of its last block."""
    has_begun: bool = False
    num_kv_bytes: int = 0

    @classmethod
    def of(
        cls,
        request: PromptMessage,
        number: int,
        now: float,
        block_size: int,
        model_id: str,
        grammar: Grammar | None = None,
        hashes: list[bytes] | None = None,
        adapter: Adapter | None = None,
    ) -> DecodePrompt:
        """Creates the prompt with a sequence for each attempt. hashes: computed if None."""
        hasher = BlockHasher(block_size, model_id, request.cache_salt, request.media, request.adapter)
        hashes = hashes or hasher.prompt_hashes(request.token_ids)
        prompt = cls(request, number, now, hasher, hashes, adapter=adapter)
        for index, (attempt_id, seed) in enumerate(zip(request.attempt_ids, request.seeds, strict=True)):
            sampling = msgspec.structs.replace(request.sampling, seed=seed)
            state = None
            if grammar is not None:
                state = grammar.new_state(
                    request.stop.stop_token_ids,
                    sampling.thinking,
                    sampling.is_grammar_optional,
                    client_of(request.cache_salt),
                )
            prompt.sequences[attempt_id] = DecodeSequence(prompt, attempt_id, (number, index), sampling, state)
        return prompt

    @property
    def num_tokens(self) -> int:
        return len(self.request.token_ids) // BYTES_PER_TOKEN

    def token_ids(self, start: int, end: int) -> list[int]:
        return unpack_token_ids(self.request.token_ids[start * BYTES_PER_TOKEN : end * BYTES_PER_TOKEN])


@dataclass(eq=False)
class DecodeSequence:
    """One sequence. Fields after `grammar` are valid once it runs."""

    prompt: DecodePrompt
    attempt_id: str
    age: tuple[int, int]
    """Order of arrival; a lower one is older."""
    sampling: SamplingParams
    grammar: GrammarState | None = None
    block_table: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens of prompt and output, including the newest one, whose KV the next step computes."""
    position_offset: int = 0
    """Difference between tokens' positions and their numbers, after images or video."""
    output_token_ids: list[int] = field(default_factory=list)
    """Generated tokens, including those of earlier attempts."""
    block_tokens: list[int] = field(default_factory=list)
    """Computed tokens of the last block."""
    parent_hash: bytes = b""
    """Hash of the blocks before the last one."""
    copy_from: int | None = None
    """A held block that the next step copies to the sequence's own last block (copy on write)."""
    num_steps: int = 0
    """Steps in flight that use its blocks. Each but the first was scheduled before the last token was known."""
    num_void_steps: int = 0
    """Steps in flight that follow one without a token, because its grammar's mask was late."""
    is_void: bool = False
    """Whether its step that has just ended was one of those."""
    ended: bool = False
    joined_at: float = 0.0
    """Time when its KV was complete."""
    stepped_at: float | None = None
    """Time when its first step began; None before."""
    _prompt_token_ids: Sequence[int] = ()
    """Tokens of the prompt for penalties, which read all of them in each step."""

    @property
    def key(self) -> tuple[str, str]:
        return self.prompt.request.proxy_id, self.attempt_id

    @property
    def client(self) -> str:
        return client_of(self.prompt.request.cache_salt)

    @property
    def may_step(self) -> bool:
        """Whether its grammar is compiled, its adapter loaded, and its newest token is or will be known."""
        is_ready = all(each is None or each.is_ready for each in (self.grammar, self.prompt.adapter))
        return is_ready and not self.num_void_steps

    @property
    def needs_tokens(self) -> bool:
        """Whether its next step can be scheduled only when the token of the running one is known.

        Items with a failed adapter are left out of a step, which changes the numbers of its samples.
        """
        adapter = self.prompt.adapter
        return adapter is not None and adapter.error is not None

    @property
    def has_more_steps(self) -> bool:
        """Whether steps follow those in flight, unless a stop token comes."""
        return not self.num_steps or len(self.output_token_ids) + self.num_steps < self.prompt.request.stop.max_tokens

    @property
    def num_tokens_to_store(self) -> int:
        """Tokens whose KV is in its blocks after its next step."""
        return self.num_tokens + self.num_steps

    def begin(self, block_table: list[int], first_token_id: int, block_size: int, position_offset: int) -> None:
        """Starts decoding. The prompt's KV is complete in `block_table`, which now belongs to the sequence."""
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
            self._prompt_token_ids = token_array(prompt.request.token_ids[: num_before * BYTES_PER_TOKEN])

    def next_item(self, follows: int | None) -> BatchItem:
        """Builds the next step's item. follows: the sample of the step in flight that has its token, if any."""
        stop = self.prompt.request.stop
        num_generated = len(self.output_token_ids) + self.num_steps
        sample = Sample(
            self.sampling,
            prompt_token_ids=self._prompt_token_ids,
            output_token_ids=self.output_token_ids if self.sampling.needs_history else (),
            banned_token_ids=stop.banned(num_generated) if stop.min_tokens else (),
            grammar=self.grammar,
        )
        return BatchItem(
            [self.output_token_ids[-1] if follows is None else 0],
            self.num_tokens_to_store - 1,
            self.block_table,
            [sample],
            position_offset=self.position_offset,
            adapter=self.prompt.adapter,
            follows=follows,
        )

    def on_token(self, token_id: int, block_size: int) -> bytes | None:
        """Appends the token that a step has sampled. Returns the hash of the last block if the step has filled it, else
        None."""
        self.block_tokens.append(self.output_token_ids[-1])
        self.output_token_ids.append(token_id)
        self.num_tokens += 1
        if len(self.block_tokens) < block_size:
            return None
        number = (self.num_tokens - 2) // block_size
        self.parent_hash = self.prompt.hasher.next_hash(self.parent_hash, self.block_tokens, number)
        self.block_tokens = []
        return self.parent_hash


class SequenceTable:
    """Sequences from their arrival until they end, by what messages name."""

    def __init__(self) -> None:
        self.by_attempt: dict[tuple[str, str], DecodeSequence] = {}  # by proxy and attempt id

    def holds(self, prompt: DecodePrompt) -> bool:
        """Whether an attempt of the prompt is known already."""
        return any(sequence.key in self.by_attempt for sequence in prompt.sequences.values())

    def add(self, prompt: DecodePrompt) -> None:
        assert not self.holds(prompt)
        self.by_attempt.update({sequence.key: sequence for sequence in prompt.sequences.values()})

    def remove(self, sequence: DecodeSequence) -> None:
        """Forgets a sequence, which has ended."""
        assert self.by_attempt.get(sequence.key) is sequence, "an attempt of this name is another's by now"
        sequence.ended = True
        del self.by_attempt[sequence.key], sequence.prompt.sequences[sequence.attempt_id]

    def of_proxy(self, proxy_id: str) -> list[DecodeSequence]:
        return [s for s in self.by_attempt.values() if s.prompt.request.proxy_id == proxy_id]

    def late(self, now: float) -> list[DecodeSequence]:
        """Returns the sequences whose deadline has passed."""
        return [s for s in self.by_attempt.values() if now >= s.prompt.arrived_at + s.prompt.request.deadline_s]
