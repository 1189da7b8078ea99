"""A prompt as the engine is given it, chunk by chunk: the same on prefill workers and on decode workers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandem.engine.batch import BatchItem, Sample
from tandem.engine.sampling.grammar import GrammarState
from tandem.engine.vision.prompt_media import PromptMedia
from tandem.protocol.messages.generation import SamplingParams, StopConditions


def first_samples(
    sampling: SamplingParams,
    seeds: Sequence[int],
    stop: StopConditions,
    token_ids: Sequence[int],
    num_generated: int,
    grammar: GrammarState | None,
) -> list[Sample]:
    """The first token of each sequence that shares the prompt. num_generated: as in StartPrefill.

    grammar: the sequences begin at one place in it, so one state does for all of them.
    """
    num_before = len(token_ids) - num_generated
    prompt_token_ids = token_ids[:num_before] if sampling.has_penalties else ()
    output_token_ids = token_ids[num_before:] if sampling.needs_history else ()
    banned = stop.banned(num_generated)
    return [
        Sample(msgspec.structs.replace(sampling, seed=seed), prompt_token_ids, output_token_ids, banned, grammar)
        for seed in seeds
    ]


def chunk(
    token_ids: Sequence[int],
    start: int,
    num_tokens: int,
    block_table: list[int],
    samples: Sequence[Sample],
    num_prompt_logprobs: int | None,
    media: PromptMedia | None = None,
) -> BatchItem:
    """The `num_tokens` tokens from `start` on. samples: taken with the prompt's last chunk."""
    end = start + num_tokens
    return BatchItem(
        token_ids=token_ids[start:end],
        start=start,
        block_table=block_table,
        samples=samples if end == len(token_ids) else (),
        num_prompt_logprobs=num_prompt_logprobs,
        target_token_ids=() if num_prompt_logprobs is None else token_ids[start + 1 : end + 1],
        media=media,
    )
