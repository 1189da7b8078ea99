"""The sampling fields of a request, checked, as the workers take them."""

from __future__ import annotations

from protocol.errors import InvalidRequest
from protocol.generation import SamplingParams
from proxy.openai_schema import ChatCompletionRequest, CompletionRequest, GenerationFields

MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024


def require(holds: bool, param: str, what: str, value: object) -> None:
    """Raises InvalidRequest for `param`, which must be `what`."""
    if not holds:
        raise InvalidRequest(f"{param} must be {what}, not {value!r}.", param)


def sampling_params(request: GenerationFields) -> SamplingParams:
    """All but the seed. Raises InvalidRequest."""
    temperature = 1.0 if request.temperature is None else request.temperature
    require(0 <= temperature <= 2, "temperature", "in [0, 2]", temperature)
    top_p = 1.0 if request.top_p is None else request.top_p
    require(0 < top_p <= 1, "top_p", "in (0, 1]", top_p)
    top_k = 0 if request.top_k in (None, -1) else request.top_k  # -1 keeps all, as in vLLM
    assert top_k is not None
    require(0 <= top_k < 2**31, "top_k", "0 or -1 (keep all) or more, below 2**31", top_k)
    min_p = request.min_p or 0.0
    require(0 <= min_p <= 1, "min_p", "in [0, 1]", min_p)
    repetition = 1.0 if request.repetition_penalty is None else request.repetition_penalty
    require(0 < repetition < float("inf"), "repetition_penalty", "more than 0", repetition)
    presence, frequency = request.presence_penalty or 0.0, request.frequency_penalty or 0.0
    require(-2 <= presence <= 2, "presence_penalty", "in [-2, 2]", presence)
    require(-2 <= frequency <= 2, "frequency_penalty", "in [-2, 2]", frequency)
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=_logit_bias(request.logit_bias or {}),
        logprobs=_num_logprobs(request),
    )


def num_prompt_logprobs(request: GenerationFields, num_logprobs: int | None) -> int | None:
    """What prefill is to tell of the prompt: because it was asked for, or to echo it with logprobs."""
    asked = request.prompt_logprobs
    if asked is not None:
        require(0 <= asked <= MAX_LOGPROBS, "prompt_logprobs", f"from 0 to {MAX_LOGPROBS}", asked)
        if request.stream:
            raise InvalidRequest("prompt_logprobs are not available in streams.", "prompt_logprobs")
    if not (isinstance(request, CompletionRequest) and request.echo) or num_logprobs is None:
        return asked
    return max(num_logprobs, asked or 0)


def _logit_bias(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    require(len(given) <= MAX_LOGIT_BIASES, "logit_bias", f"at most {MAX_LOGIT_BIASES} tokens", len(given))
    biases = []
    for key, bias in given.items():
        require(key.isascii() and key.isdigit() and int(key) < 2**31, "logit_bias", "a map from token ids", key)
        require(-100 <= bias <= 100, "logit_bias", "a map to numbers in [-100, 100]", bias)
        biases.append((int(key), bias))
    return tuple(biases)


def _num_logprobs(request: GenerationFields) -> int | None:
    if isinstance(request, ChatCompletionRequest):
        num_top = request.top_logprobs
        if num_top is not None:
            require(0 <= num_top <= MAX_LOGPROBS, "top_logprobs", f"from 0 to {MAX_LOGPROBS}", num_top)
            if num_top and not request.logprobs:
                raise InvalidRequest("top_logprobs is only allowed together with logprobs.", "top_logprobs")
        return (num_top or 0) if request.logprobs else None
    assert isinstance(request, CompletionRequest)
    if request.logprobs is None or request.logprobs is False:
        return None
    require(0 <= request.logprobs <= MAX_LOGPROBS, "logprobs", f"from 0 to {MAX_LOGPROBS}", request.logprobs)
    return int(request.logprobs)
