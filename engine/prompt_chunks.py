"""Builds the engine's input for chunks of a prompt, on prefill workers and on decode workers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandem.engine.batch import BatchItem, Sample
from tandem.engine.lora.adapters import Adapter
from tandem.engine.sampling.grammar import GrammarState
from tandem.engine.vision.prompt_media import PromptMedia
from tandem.protocol.messages.generation import Pooling, SamplingParams, StopConditions


def first_samples(
    sampling: SamplingParams,
    seeds: Sequence[int],
    stop: StopConditions,
    token_ids: Sequence[int],
    num_generated: int,
    grammar: GrammarState | None,
) -> list[Sample]:
    """Builds the first sample of each sequence that shares the prompt, one per seed. num_generated: as in StartPrefill.

    grammar: one state for all, because the sequences start from the same tokens.
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
    adapter: Adapter | None = None,
    pooling: Pooling | None = None,
) -> BatchItem:
    """Builds the chunk of `num_tokens` tokens from `start`. samples: used only in the prompt's last chunk."""
    end = start + num_tokens
    is_last = end == len(token_ids)
    return BatchItem(
        token_ids=token_ids[start:end],
        start=start,
        block_table=block_table,
        samples=samples if is_last else (),
        num_prompt_logprobs=num_prompt_logprobs,
        target_token_ids=() if num_prompt_logprobs is None else token_ids[start + 1 : end + 1],
        media=media,
        adapter=adapter,
        pooling=pooling if is_last or pooling == "mean" else None,
    )
