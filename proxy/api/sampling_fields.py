"""The sampling fields of a request, checked, as the workers take them."""

from __future__ import annotations

from tandem.protocol.messages.generation import SamplingParams
from tandem.proxy.api.schema import ChatCompletionRequest, CompletionRequest, GenerationFields
from tandem.runtime.errors import InvalidRequest


def require(holds: bool, param: str, what: str, value: object) -> None:
    """Raises InvalidRequest for `param`, which must be `what`."""
    if not holds:
        raise InvalidRequest(f"{param} must be {what}, not {value!r}.", param)


def sampling_params(request: GenerationFields, grammar: str | None = None) -> SamplingParams:
    """All but the seed and the bad words, which are tokenised later. Null is the default. Raises InvalidRequest."""
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(request.top_k or 0, 0),  # -1 keeps all, as in vLLM
        min_p=request.min_p or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=tuple((int(token_id), bias) for token_id, bias in (request.logit_bias or {}).items()),
        allowed_token_ids=tuple(sorted(set(request.allowed_token_ids or ()))),
        logprobs=_num_logprobs(request),
        grammar=grammar,
    )


def num_prompt_logprobs(request: GenerationFields, num_logprobs: int | None) -> int | None:
    """What prefill is to tell of the prompt: because it was asked for, or to echo it with logprobs."""
    asked = request.prompt_logprobs
    if asked is not None and request.stream:
        raise InvalidRequest("prompt_logprobs are not available in streams.", "prompt_logprobs")
    if not (isinstance(request, CompletionRequest) and request.echo) or num_logprobs is None:
        return asked
    return max(num_logprobs, asked or 0)


def _num_logprobs(request: GenerationFields) -> int | None:
    if isinstance(request, ChatCompletionRequest):
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequest("top_logprobs is only allowed together with logprobs.", "top_logprobs")
        return (request.top_logprobs or 0) if request.logprobs else None
    assert isinstance(request, CompletionRequest)
    return None if request.logprobs is None or request.logprobs is False else int(request.logprobs)
