"""Fields of bodies: decoding them, what they mean to the workers, and which values and combinations are refused.

Errors about a single field name it, what is allowed, and the value that the client sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from tandem.protocol.messages.sampling import SamplingParams
from tandem.proxy.api.generation_request import ALL_LOGPROBS
from tandem.proxy.api.request_settings import RequestSettings
from tandem.proxy.api.schema import (
    MAX_STOP_CHARACTERS,
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationFields,
)
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.whole_numbers import decode_whole

R = TypeVar("R")
MAX_SHOWN_CHARACTERS = 80
"""Length at which errors cut the values that they show."""
_ERROR_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_MISSING_FIELD = re.compile(r"required field `(\w+)`")
_BOUNDS = {">=": "greater_than_equal", "<=": "less_than_equal", ">": "greater_than", "<": "less_than"}
"""Pydantic's names, which clients of vLLM look for in errors about numbers."""
_FLOAT_FOR_INTEGER = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_BOUND = re.compile(r"Expected `(?:int|float)(?: \| null)?` (>=|<=|>|<) ")


def decode_body(decoder: msgspec.json.Decoder[R], body: bytes) -> R:
    """Raises InvalidRequest."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        if _FLOAT_FOR_INTEGER.match(message):
            try:
                return cast(R, decode_whole(decoder, body))
            except msgspec.ValidationError as other:
                message = str(other)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                pass  # the body is malformed behind the field, which the error below tells
        raise _invalid_field(message, body) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error


def _invalid_field(message: str, body: bytes) -> InvalidRequest:
    """Returns the error for a body that has the wrong form.

    message: msgspec's, which ends with the path of the field. It does not have the value, so that is looked up in the
    body, which is JSON.
    """
    path = _ERROR_PATH.search(message)
    field = path[1].partition("[...]")[0] if path is not None else ""  # [...] is any member of an object
    message = message if path is None else message[: path.start()]
    if (missing := _MISSING_FIELD.search(message)) is not None:
        param = ".".join(name for name in (field, missing[1]) if name)
        return InvalidRequest(f"{field}: {message}." if field else f"{message}.", param)
    if (bound := _BOUND.match(message)) is not None:
        message = f"{message} ({_BOUNDS[bound[1]]})"
    if not field:
        return InvalidRequest(f"{message}.")
    try:
        value = shown_value(_value_at(field, msgspec.json.decode(body)))
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
    ) as error:  # the body is malformed behind the wrong field
        return InvalidRequest(f"The body is not valid JSON: {error}.")
    except (LookupError, TypeError):  # an object has a key twice, and the other value has another form
        return InvalidRequest(f"{field}: {message}.", field)
    return InvalidRequest(f"{field} is {value}: {message}.", field)


def shown_value(value: Any) -> str:
    """Returns the value as JSON, cut to MAX_SHOWN_CHARACTERS."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def refuse_unsupported(request: msgspec.Struct, neutral_values: Mapping[str, Sequence[Any]]) -> None:
    """Raises InvalidRequest if a field has another value than its neutral ones, which include null."""
    for field, neutral in neutral_values.items():
        value = getattr(request, field)
        # In Python `0 == False`, but 0 is not a neutral value of a boolean field.
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
            raise InvalidRequest(f"{field} is {shown_value(value)}, which is not supported; leave it out.", field)


def _value_at(path: str, document: Any) -> Any:
    """path: such as `messages[0].content`."""
    for name, index in _STEP.findall(path):
        document = document[int(index)] if index else document[name]
    return document


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


_NOT_WITH_BEAMS = {
    "stream": False, "stop": None, "stop_token_ids": None, "min_tokens": 0, "presence_penalty": 0,
    "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": None, "allowed_token_ids": None, "bad_words": None,
    "prompt_logprobs": None, "logprob_token_ids": None, "tools": None, "thinking_token_budget": -1,
}  # fmt: skip
"""Fields that a beam search does not take, and their neutral values."""


FEW_STOP_STRINGS = 16
"""Stop strings that any request may have."""
MAX_STOP_SEARCHES = 2048
"""Stop strings times sequences of a request with more: each piece of each text is searched for each of them, on the
event loop."""


def check_logprobs(request: GenerationFields, settings: RequestSettings) -> None:
    asked = [("prompt_logprobs", request.prompt_logprobs)]
    if isinstance(request, ChatCompletionRequest):
        has_logprobs = request.logprobs in (True, "true")
        asked.append(("top_logprobs", request.top_logprobs))
        if request.top_logprobs and not has_logprobs:
            raise InvalidRequest("top_logprobs requires logprobs; set logprobs to true.", "top_logprobs")
    else:
        assert isinstance(request, CompletionRequest)
        has_logprobs = request.logprobs is not None and request.logprobs is not False
        asked.append(("logprobs", request.logprobs))
    if request.logprob_token_ids and not has_logprobs:
        raise InvalidRequest("logprob_token_ids requires logprobs; set logprobs as well.", "logprob_token_ids")
    for field, number in asked:
        if number is not None and number > (limit := settings.max_logprobs) != -1:
            raise InvalidRequest(f"{field} is {number}, but this server's limit is {limit} (--max-logprobs).", field)
    if request.stream and request.prompt_logprobs:
        raise InvalidRequest(
            "prompt_logprobs is not available for streams; leave it out or set stream to false.", "prompt_logprobs"
        )


def check_stop_strings(strings: Sequence[str], param: str) -> None:
    if sum(map(len, strings)) > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"{param} has more than {MAX_STOP_CHARACTERS} characters together, the limit; send fewer or shorter ones.",
            param,
        )


def check_stop_searches(num_strings: int, num_sequences: int) -> None:
    if num_strings * num_sequences > MAX_STOP_SEARCHES:
        raise InvalidRequest(
            f"stop has {num_strings} strings for at least {num_sequences} sequences (prompts times n); more than "
            f"{FEW_STOP_STRINGS} strings are served if strings times sequences are at most {MAX_STOP_SEARCHES}. "
            "Send fewer.",
            "stop",
        )


def check_truncation(num_tokens: int | None) -> None:
    if num_tokens == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1, not 0.", "truncate_prompt_tokens")


def check_beam_search(request: GenerationFields, is_prompt_only: bool) -> None:
    for field, neutral in _NOT_WITH_BEAMS.items():
        if (value := getattr(request, field, None)) not in (None, neutral, [], {}):
            raise InvalidRequest(
                f"{field} is {shown_value(value)}, which is not supported with use_beam_search; leave one out.", field
            )
    if (
        isinstance(request, CompletionRequest)
        and request.echo
        and (is_prompt_only or num_logprobs(request) is not None)
    ):
        raise InvalidRequest(
            "echo with use_beam_search repeats the prompt without logprobs and before an answer; leave one out.", "echo"
        )
