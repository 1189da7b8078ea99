"""Prompts of the prefill role: how far each is computed and which attempts wait for a first token, and the table of all
by state and by the ids that messages name. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.decode_worker.sequence import ComputedPrompt
from tandem.engine.batch import BatchItem, Sample
from tandem.engine.lora.adapter import Adapter
from tandem.engine.sampling.grammar import Grammar, GrammarState
from tandem.engine.vision.prompt_media import EncodeUnit, PromptMedia
from tandem.handover.outgoing import OutgoingTransfer
from tandem.protocol.messages.dispatch import FirstToken, StartPrefill
from tandem.protocol.messages.packed import unpack_token_ids
from tandem.protocol.messages.sampling import SampledToken
from tandem.protocol.prefix_hash import BlockHasher, client_of


@dataclass(eq=False)
class PrefillPrompt:
    """A prompt from its arrival until its blocks are released.

    pair_id: None if it is not shipped. decodes_here: this worker also decodes its sequences. open_ids: attempt_ids that
    wait for the first token.
    """

    request: StartPrefill
    pair_id: str | None
    decodes_here: bool
    number: int  # in order of arrival
    arrived_at: float
    token_ids: list[int]
    open_ids: set[str]
    samples: list[Sample]
    grammar: Grammar | None
    grammar_state: GrammarState | None
    media: PromptMedia | None = None
    adapter: Adapter | None = None
    started_at: float = 0.0
    computed_at: float = 0.0
    num_computed_tokens: int = 0  # including cached ones
    num_cached_tokens: int = 0
    hashes: list[bytes] = field(default_factory=list)  # of full blocks, once it has begun
    num_published_blocks: int = 0
    block_table: list[int] = field(default_factory=list)
    prompt_logprobs: list[bytes] = field(default_factory=list)  # packed
    pooled: NDArray[np.float64] | None = None  # so far
    first_token_ids: list[int] | None = None
    in_step: bool = False
    ended: bool = False
    transfer: OutgoingTransfer[PrefillPrompt] | None = None
    """None if the prompt is not shipped, and once nothing reads its blocks."""

    @classmethod
    def of(
        cls,
        request: StartPrefill,
        pair_id: str | None,
        decodes_here: bool,
        number: int,
        now: float,
        grammar: Grammar | None = None,
        media: PromptMedia | None = None,
        adapter: Adapter | None = None,
    ) -> PrefillPrompt:
        token_ids = unpack_token_ids(request.token_ids)
        sampling, state = request.sampling, None
        if grammar is not None:
            state = grammar.new_state(
                request.stop.stop_token_ids,
                sampling.thinking,
                sampling.is_grammar_optional,
                client_of(request.cache_salt),
            )
        samples = _first_samples(request, token_ids, state) if request.pooling is None else []
        open_ids = set(request.attempt_ids)
        return cls(
            request, pair_id, decodes_here, number, now, token_ids, open_ids, samples, grammar, state, media, adapter
        )

    @property
    def late_at(self) -> float:
        """When the prompt's deadline passes. From its last shipment on, decode watches over it."""
        return math.inf if self.transfer is not None and self.transfer.finish_sent else self.deadline

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
        """Whether its grammar is compiled, its adapter loaded, and its media have arrived."""
        waits_for = (self.grammar_state, self.adapter, self.media)
        return all(each is None or each.is_ready for each in waits_for)

    @property
    def may_use_cache(self) -> bool:
        """Whether blocks of the prefix cache can replace computing: not if every token's result is wanted."""
        return self.request.num_prompt_logprobs is None and self.request.pooling != "mean"

    @property
    def has_begun(self) -> bool:
        return bool(self.block_table)

    @property
    def client(self) -> str:
        return client_of(self.request.cache_salt)

    @property
    def deadline(self) -> float:
        return self.arrived_at + self.request.deadline_s

    def hash_blocks(self, block_size: int, model_id: str) -> list[bytes]:
        """Computes the hashes of all full blocks. Called once, when the prompt begins."""
        request = self.request
        hasher = BlockHasher(block_size, model_id, request.cache_salt, request.media, request.adapter)
        self.hashes = hasher.prompt_hashes(request.token_ids)
        return self.hashes

    def next_item(self, num_tokens: int) -> BatchItem:
        """Returns the next chunk. Only the last one samples tokens."""
        request, start = self.request, self.num_computed_tokens
        end = start + num_tokens
        is_last = end == self.num_prompt_tokens
        return BatchItem(
            token_ids=self.token_ids[start:end],
            start=start,
            block_table=self.block_table,
            samples=self.samples if is_last else (),
            num_prompt_logprobs=request.num_prompt_logprobs,
            target_token_ids=() if request.num_prompt_logprobs is None else self.token_ids[start + 1 : end + 1],
            media=self.media,
            adapter=self.adapter,
            pooling=request.pooling if is_last or request.pooling == "mean" else None,
        )

    def next_work(
        self, num_planned: int, limit: int, planned: Collection[EncodeUnit], may_exceed: bool
    ) -> tuple[int, list[EncodeUnit], int]:
        """Plans more of a step: returns (tokens after the planned ones, media units to encode first, cost of these
        units).

        limit: the work allowed, in tokens. may_exceed: see `PromptMedia.afford`.
        """
        start = self.num_computed_tokens + num_planned
        end = min(self.num_prompt_tokens, start + limit)
        if self.media is None:
            return end - start, [], 0
        end, units, cost = self.media.afford(start, end, limit, planned, may_exceed)
        return end - start, units, cost

    def add_pooled(self, packed: bytes) -> None:
        """Adds what a step has returned of the hidden states."""
        values = np.frombuffer(packed, np.float64)
        self.pooled = values if self.pooled is None else self.pooled + values

    def embedding(self, now: float) -> list[FirstToken]:
        """Returns the message with the embedding of a computed prompt, if its attempt is still open."""
        assert self.pooled is not None
        [attempt_id] = self.request.attempt_ids
        if attempt_id not in self.open_ids:
            return []
        values = self.pooled
        if self.request.pooling == "mean":
            values = values.reshape(2, -1).sum(0) / self.num_prompt_tokens
        return [
            FirstToken(
                attempt_id,
                SampledToken(0),
                "length",
                self.started_at - self.arrived_at,
                now - self.started_at,
                num_cached_tokens=self.num_cached_tokens,
                embedding=values.astype(np.float32).tobytes(),
            )
        ]

    def first_tokens(self, now: float, tokens: list[SampledToken]) -> list[FirstToken]:
        """Takes the sampled tokens, one for each attempt, and returns messages for the attempts that are still open."""
        self.first_token_ids = [token.token_id for token in tokens]
        request = self.request
        messages = []
        for number, (attempt_id, token) in enumerate(zip(request.attempt_ids, tokens, strict=True)):
            if attempt_id not in self.open_ids:
                continue
            # Sequences that share the prompt get its logprobs once.
            has_logprobs = request.num_prompt_logprobs is not None and number == 0
            messages.append(
                FirstToken(
                    attempt_id,
                    token,
                    request.stop.check(token.token_id, request.num_generated + 1),
                    self.started_at - self.arrived_at,
                    now - self.started_at,
                    self.prompt_logprobs if has_logprobs else None,
                    self.num_cached_tokens,
                )
            )
        return messages

    def complete_blocks(self, block_size: int) -> list[int]:
        """Returns the blocks whose content is complete."""
        return self.block_table if self.is_computed else self.block_table[: self.num_computed_tokens // block_size]

    def computed(self) -> ComputedPrompt:
        """Returns what the decode role of this worker needs of a computed prompt."""
        assert self.first_token_ids is not None
        return ComputedPrompt(
            self.request,
            self.open_ids,
            self.arrived_at,
            self.hashes,
            self.block_table,
            self.first_token_ids,
            self.position_offset,
            self.grammar,
            self.adapter,
        )

    @property
    def position_offset(self) -> int:
        """Offset between tokens' positions and their numbers after the prompt. Valid once it is computed."""
        return self.media.position_offset if self.media is not None else 0


def _first_samples(request: StartPrefill, token_ids: list[int], grammar: GrammarState | None) -> list[Sample]:
    """Returns the first sample of each sequence. All share one grammar state: they start from the same tokens."""
    sampling, num_before = request.sampling, len(token_ids) - request.num_generated
    prompt_token_ids = token_ids[:num_before] if sampling.has_penalties else ()
    output_token_ids = token_ids[num_before:] if sampling.needs_history else ()
    banned = request.stop.banned(request.num_generated)
    return [
        Sample(msgspec.structs.replace(sampling, seed=seed), prompt_token_ids, output_token_ids, banned, grammar)
        for seed in request.seeds
    ]


class PromptTable:
    """Prompts from their arrival until their blocks are released."""

    def __init__(self) -> None:
        self.waiting: dict[int, PrefillPrompt] = {}  # by number, in order of arrival
        self.computing: dict[int, PrefillPrompt] = {}
        self.by_attempt: dict[tuple[str, str], PrefillPrompt] = {}  # open attempts, by proxy and attempt id
        self.by_transfer: dict[str, PrefillPrompt] = {}  # all prompts

    @property
    def num_running(self) -> int:
        return len(self.by_transfer) - len(self.waiting)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def is_idle(self) -> bool:
        return not self.by_transfer

    def waiting_tokens(self) -> list[tuple[int, int]]:
        """Returns the prompt tokens still to be computed, as (priority, tokens)."""
        tokens: Counter[int] = Counter()
        for prompt in (*self.waiting.values(), *self.computing.values()):
            tokens[prompt.request.priority] += prompt.num_remaining_tokens
        return sorted(tokens.items())

    def holds(self, request: StartPrefill) -> bool:
        """Whether the transfer or an attempt of the request is known already."""
        keys = ((request.proxy_id, attempt_id) for attempt_id in request.attempt_ids)
        return request.transfer_id in self.by_transfer or any(key in self.by_attempt for key in keys)

    def add(self, prompt: PrefillPrompt) -> None:
        request = prompt.request
        assert not self.holds(request), "the scheduler refuses a prompt that is known"
        self.by_attempt.update({(request.proxy_id, attempt_id): prompt for attempt_id in request.attempt_ids})
        self.by_transfer[request.transfer_id] = prompt
        self.waiting[prompt.number] = prompt

    def begin(self, prompt: PrefillPrompt) -> None:
        """Moves a waiting prompt to those that compute."""
        assert not prompt.ended, "one that has ended waits for nothing"
        del self.waiting[prompt.number]
        self.computing[prompt.number] = prompt

    def end_attempt(self, proxy_id: str, attempt_id: str) -> PrefillPrompt | None:
        """Forgets an open attempt and returns its prompt; None if it is not known."""
        prompt = self.by_attempt.pop((proxy_id, attempt_id), None)
        if prompt is not None:
            prompt.open_ids.discard(attempt_id)
        return prompt

    def forget(self, prompt: PrefillPrompt) -> None:
        for attempt_id in prompt.open_ids:
            self.by_attempt.pop((prompt.request.proxy_id, attempt_id), None)
        del self.by_transfer[prompt.request.transfer_id]

    def of_proxy(self, proxy_id: str) -> list[PrefillPrompt]:
        return [prompt for prompt in self.by_transfer.values() if prompt.request.proxy_id == proxy_id]

    def late(self, now: float) -> list[PrefillPrompt]:
        """Returns the prompts whose deadline has passed."""
        return [prompt for prompt in self.by_transfer.values() if not prompt.ended and now >= prompt.late_at]
