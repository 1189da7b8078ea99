"""What one step computes and what comes of it: pure data between the schedulers and the model runner."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from tandem.engine.sampling.grammar import GrammarState
from tandem.engine.vision.prompt_media import EncodeUnit, PromptMedia
from tandem.protocol.messages.generation import SampledToken, SamplingParams, TokenLogprobs
from tandem.runtime.errors import ErrorInfo


class Sample(msgspec.Struct, frozen=True):
    """One token to choose, at the position after an item's last.

    prompt_token_ids and output_token_ids: what came before, filled in where `params.has_penalties`; the latter also
    where `params.needs_history`.
    banned_token_ids: impossible here. grammar: the sequence's own state; never leaves the process.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    banned_token_ids: Collection[int] = ()
    grammar: GrammarState | None = None


class BatchItem(msgspec.Struct, frozen=True):
    """One sequence's share of a step: its tokens at positions `start` to `start + len(token_ids)`.

    block_table: covers at least those positions. samples: tokens to choose from the last position's logits, none while
    the prompt goes on, several where sequences share a prompt. num_prompt_logprobs: None, or how many top tokens to
    report for each of target_token_ids, the prompt's tokens at positions `start + 1` and on.
    media: of the prompt that this is a chunk of; never leaves the process. position_offset: what a model is told over
    the tokens' numbers as their positions, where media says nothing else.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    samples: Sequence[Sample] = ()
    num_prompt_logprobs: int | None = None
    target_token_ids: Sequence[int] = ()
    media: PromptMedia | None = None
    position_offset: int = 0


class Encode(msgspec.Struct, frozen=True):
    """A unit of media to run through the vision tower before the step's items; the result goes into `media`."""

    media: PromptMedia
    unit: EncodeUnit


class Batch(msgspec.Struct, frozen=True):
    """One step. block_copies: (source, destination) block ids, copied before anything is computed. encodes: there may
    be some and no items.
    """

    items: list[BatchItem]
    block_copies: Sequence[tuple[int, int]] = ()
    encodes: Sequence[Encode] = ()


class ItemOutput(msgspec.Struct, frozen=True):
    """tokens: one for each of the item's samples. prompt_logprobs: one for each of its target_token_ids.

    error: its grammar could not be followed, or its media not be used; the tokens mean nothing then.
    """

    tokens: list[SampledToken]
    prompt_logprobs: list[TokenLogprobs] = []
    error: ErrorInfo | None = None
