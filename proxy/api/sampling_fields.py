"""Sampling parameters: what the sampling fields of a body mean to the workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.protocol.messages.sampling import SamplingParams
from tandem.proxy.api.generation_request import ALL_LOGPROBS
from tandem.proxy.api.schema import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, GenerationFields

_SAME_NAMES = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields of a body that `SamplingParams` has too. Null means their default."""


def sampling_params(request: GenerationFields) -> SamplingParams:
    """Returns all but the seed, the bad words, which are tokenised later, and the grammar, which is checked later."""
    given, top_k = given_fields(request, _SAME_NAMES), max(request.top_k or 0, 0)  # -1 also means all
    if given.get("top_p") == 0:  # the smallest nucleus: the most likely token
        del given["top_p"]
        top_k = 1
    return SamplingParams(
        **given,
        top_k=top_k,
        logit_bias=tuple((int(token_id), bias) for token_id, bias in (request.logit_bias or {}).items()),
        allowed_token_ids=tuple(sorted(set(request.allowed_token_ids or ()))),
        logprobs=_num_reported(request),
        logprob_token_ids=tuple(dict.fromkeys(request.logprob_token_ids or ())),
    )


def num_top(number: int | None) -> int | None:
    """Returns the number of top tokens that a field asks for; -1 means all."""
    return ALL_LOGPROBS if number == -1 else number


def num_logprobs(request: GenerationFields) -> int | None:
    """Returns how many top tokens the answer shows for each token; None for no logprobs."""
    if isinstance(request, ChatCompletionRequest):
        number = (request.top_logprobs or 0) if request.logprobs in (True, "true") else None
    else:
        assert isinstance(request, CompletionRequest)
        number = None if request.logprobs is None or request.logprobs is False else int(request.logprobs)
    return num_top(number)


def _num_reported(request: GenerationFields) -> int | None:
    """Returns how many top tokens the workers report."""
    named = request.logprob_token_ids
    return 1 + len(set(named)) if named else num_logprobs(request)


def num_prompt_logprobs(request: GenerationFields) -> int | None:
    """Returns how many top tokens the workers report for each prompt token. An echo with logprobs needs them too."""
    requested, shown = None if request.stream else num_top(request.prompt_logprobs), num_logprobs(request)
    if not (isinstance(request, CompletionRequest) and request.echo) or shown is None:
        return requested
    return max(shown, requested or 0)


def given_fields(request: GenerationFields | EmbeddingRequest, names: Iterable[str]) -> dict[str, Any]:
    """Returns the fields that are not null."""
    return {name: value for name in names if (value := getattr(request, name, None)) is not None}
