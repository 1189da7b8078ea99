"""A step's input and output: pure data between the schedulers and the model runner."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from tandem.engine.lora.adapter import Adapter
from tandem.engine.sampling.grammar import GrammarState
from tandem.engine.vision.prompt_media import EncodeUnit, PromptMedia
from tandem.protocol.messages.sampling import Pooling, SampledToken, SamplingParams, TokenLogprobs
from tandem.runtime.errors import ErrorInfo


class Sample(msgspec.Struct, frozen=True):
    """One token to sample, at the position after an item's last token."""

    params: SamplingParams
    prompt_token_ids: Sequence[int] = ()
    """History of the prompt; set if `params.has_penalties`."""
    output_token_ids: Sequence[int] = ()
    """History of the output; set if `params.has_penalties` or `params.needs_history`."""
    banned_token_ids: Collection[int] = ()
    """Tokens that cannot be chosen."""
    grammar: GrammarState | None = None
    """The sequence's state; never leaves the process."""


class BatchItem(msgspec.Struct, frozen=True):
    """One sequence's share of a step: its tokens at positions `start` to `start + len(token_ids)`."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    """Pool blocks that cover at least those positions."""
    samples: Sequence[Sample] = ()
    """Tokens to sample from the last position's logits: none before the end of the prompt, several if sequences
    share the prompt."""
    num_prompt_logprobs: int | None = None
    """Number of top tokens to report for each of `target_token_ids`; None reports none."""
    target_token_ids: Sequence[int] = ()
    """The prompt's tokens from position `start + 1` on."""
    media: PromptMedia | None = None
    """Images and videos of the whole prompt; never leaves the process."""
    position_offset: int = 0
    """Added to the positions that the model gets, unless media defines them."""
    adapter: Adapter | None = None
    """Loaded LoRA adapter; never leaves the process."""
    pooling: Pooling | None = None
    """Hidden states to return: the last one, or their sums for a mean; None returns none."""
    follows: int | None = None
    """Number of the sample of the step before whose token is the item's only one; `token_ids` then holds a 0."""


class Encode(msgspec.Struct, frozen=True):
    """A unit of media to encode before the step's items; the result is stored in `media`."""

    media: PromptMedia
    unit: EncodeUnit


class Batch(msgspec.Struct, frozen=True):
    """One step. block_copies: (source, destination) block ids, copied first. A step may have encodes and no items."""

    items: list[BatchItem]
    block_copies: Sequence[tuple[int, int]] = ()
    encodes: Sequence[Encode] = ()


class ItemOutput(msgspec.Struct, frozen=True):
    """What a step computed for one item."""

    tokens: list[SampledToken]
    """One for each sample of the item."""
    prompt_logprobs: list[TokenLogprobs] = []
    """One for each target token."""
    error: ErrorInfo | None = None
    """Failure of the grammar, the media or the adapter; then the tokens are meaningless."""
    is_late: bool = False
    """Whether the grammar's mask was not computed in time: the tokens are meaningless, and are sampled again later."""
    pooled: bytes | None = None
    """float64 values, packed: the last hidden state, or `engine.model_head.exact_sums` for a mean."""
