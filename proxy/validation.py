"""Request bodies to `GenerationRequest`, or InvalidRequest naming the field. What cannot be served is refused here."""

from __future__ import annotations

import re
import secrets
from typing import Any, TypeVar

import msgspec

from protocol.errors import InvalidRequest
from protocol.generation import SamplingParams, StopConditions
from proxy.openai_schema import ChatCompletionRequest, ChatMessage, CompletionRequest, GenerationFields, NotServedYet
from proxy.registry import ModelLimits
from proxy.rendering import ChatPrompt, CompletionPrompt, ContextLengthExceeded, RenderedPrompts
from proxy.sampling_fields import num_prompt_logprobs, require, sampling_params

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 1024
COMPLETION_DEFAULT_MAX_TOKENS = 16

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "spaces_between_special_tokens": (True,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
}
"""Beside null, which always is: values of fields not served yet that ask for nothing."""


class ModelNotFound(InvalidRequest):
    """The client names a model that is not served here."""

    code = "model_not_found"


class GenerationRequest(msgspec.Struct, frozen=True):
    """One HTTP request for generation, checked.

    max_tokens: None takes `default_max_tokens`, or all that fits. base_sampling: without a seed. seed: of the first of
    the n sequences of a prompt. prompt_logprobs: how many top tokens the client wants to see for each of the prompt;
    num_prompt_logprobs: how many to ask prefill for, which an echo may need too. priority: vLLM's, lower is sooner.
    """

    prompt: ChatPrompt | CompletionPrompt | RenderedPrompts
    max_tokens: int | None
    default_max_tokens: int | None
    max_tokens_param: str
    n: int
    base_sampling: SamplingParams
    seed: int | None
    stop: list[str]
    stop_token_ids: frozenset[int]
    min_tokens: int
    ignore_eos: bool
    num_prompt_logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    skip_special_tokens: bool
    include_stop_string: bool
    truncate_prompt_tokens: int | None
    cache_salt: str
    priority: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool

    def samplings(self) -> list[SamplingParams]:
        """Of the n sequences of one prompt. The seeds stay in [0, 2**63)."""
        first = secrets.randbits(63) if self.seed is None else self.seed
        return [msgspec.structs.replace(self.base_sampling, seed=(first + i) % 2**63) for i in range(self.n)]

    def check_vocabulary(self, limits: ModelLimits) -> None:
        """Raises InvalidRequest when the client biases tokens that the model does not have."""
        largest = max((token_id for token_id, _ in self.base_sampling.logit_bias), default=0)
        require(largest < limits.vocab_size, "logit_bias", f"a map from ids below {limits.vocab_size}", largest)

    def max_prompt_tokens(self, limits: ModelLimits) -> int | None:
        """What a longer prompt is cut to, from its beginning, or None where it is refused."""
        if self.truncate_prompt_tokens == -1:
            return max(1, limits.max_model_len - (self.max_tokens or 1))
        return self.truncate_prompt_tokens

    def stop_conditions(
        self, num_prompt_tokens: int, limits: ModelLimits, eos_token_ids: frozenset[int]
    ) -> StopConditions:
        """Raises ContextLengthExceeded when the client insists on more tokens than fit."""
        room = limits.max_model_len - num_prompt_tokens
        if self.max_tokens is not None and self.max_tokens > room:
            raise ContextLengthExceeded(
                f"The prompt has {num_prompt_tokens} tokens and {self.max_tokens_param} is {self.max_tokens}, together "
                f"{num_prompt_tokens + self.max_tokens}, but this model's limit is {limits.max_model_len} tokens.",
                self.max_tokens_param,
            )
        max_tokens = self.max_tokens or min(room, self.default_max_tokens or room)
        stop_token_ids = self.stop_token_ids | (frozenset() if self.ignore_eos else eos_token_ids)
        return StopConditions(max_tokens, stop_token_ids, self.min_tokens)


R = TypeVar("R")


class BodyDecoder:
    """Decodes and checks the two kinds of bodies."""

    def __init__(self, served_model_name: str) -> None:
        self._served_model_name = served_model_name
        self._completion = msgspec.json.Decoder(CompletionRequest)
        self._chat = msgspec.json.Decoder(ChatCompletionRequest)

    def completion(self, body: bytes) -> GenerationRequest:
        request = _decode(self._completion, body)
        prompt = CompletionPrompt(msgspec.Raw(bytes(request.prompt)), request.add_special_tokens is not False)
        return self._check(request, prompt, request.max_tokens, "max_tokens", COMPLETION_DEFAULT_MAX_TOKENS)

    def chat(self, body: bytes) -> GenerationRequest:
        request = _decode(self._chat, body)
        if not request.messages:
            raise InvalidRequest("messages must hold at least one message.", "messages")
        messages = [_message(number, message) for number, message in enumerate(request.messages)]
        prompt = ChatPrompt(messages, request.add_generation_prompt is not False, bool(request.add_special_tokens))
        if request.max_completion_tokens is not None:
            return self._check(request, prompt, request.max_completion_tokens, "max_completion_tokens", None)
        return self._check(request, prompt, request.max_tokens, "max_tokens", None)

    def _check(
        self,
        request: GenerationFields,
        prompt: ChatPrompt | CompletionPrompt,
        max_tokens: int | None,
        max_tokens_param: str,
        default_max_tokens: int | None,
    ) -> GenerationRequest:
        if request.model is not None and request.model != self._served_model_name:
            raise ModelNotFound(
                f"The model {request.model!r} does not exist; this server has {self._served_model_name!r}.", "model"
            )
        _refuse_what_is_not_served(request)
        if max_tokens is not None and max_tokens < 1:
            raise InvalidRequest(f"{max_tokens_param} must be at least 1, not {max_tokens}.", max_tokens_param)
        n = 1 if request.n is None else request.n
        require(1 <= n <= MAX_N, "n", f"from 1 to {MAX_N}", n)
        if request.seed is not None:
            require(-(2**63) <= request.seed < 2**63, "seed", "a 64-bit integer", request.seed)
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        require(len(stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings", len(stop))
        for text in stop:
            require(0 < len(text) <= MAX_STOP_STRING_CHARACTERS, "stop", "strings of 1 to 1024 characters", text[:20])
        stop_token_ids = frozenset(request.stop_token_ids or ())
        require(
            all(0 <= i < 2**31 for i in stop_token_ids) and len(stop_token_ids) <= 1024,
            "stop_token_ids",
            "at most 1024 token ids",
            f"{len(stop_token_ids)} numbers",
        )
        min_tokens = request.min_tokens or 0
        most = 2**31 if max_tokens is None else max_tokens
        require(0 <= min_tokens <= most, "min_tokens", f"from 0 to {max_tokens_param}", min_tokens)
        truncate = request.truncate_prompt_tokens
        require(
            truncate is None or truncate == -1 or truncate >= 1, "truncate_prompt_tokens", "1 or more, or -1", truncate
        )
        priority = request.priority or 0
        require(-(2**31) <= priority < 2**31, "priority", "a 32-bit integer", priority)
        sampling = sampling_params(request)
        options = request.stream_options
        if options is not None and not request.stream:
            raise InvalidRequest("stream_options is only allowed together with stream.", "stream_options")
        return GenerationRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            default_max_tokens=default_max_tokens,
            max_tokens_param=max_tokens_param,
            n=n,
            base_sampling=sampling,
            seed=request.seed,
            stop=stop,
            stop_token_ids=stop_token_ids,
            min_tokens=min_tokens,
            ignore_eos=bool(request.ignore_eos),
            num_prompt_logprobs=num_prompt_logprobs(request, sampling.logprobs),
            prompt_logprobs=request.prompt_logprobs,
            echo=isinstance(request, CompletionRequest) and bool(request.echo),
            skip_special_tokens=request.skip_special_tokens is not False,
            include_stop_string=bool(request.include_stop_str_in_output),
            truncate_prompt_tokens=truncate,
            cache_salt=request.cache_salt or "",
            priority=priority,
            stream=bool(request.stream),
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            return_token_ids=bool(request.return_token_ids),
        )


_PATH = re.compile(r" - at `\$(?:\.([^`]*))?`$")


def _decode(decoder: msgspec.json.Decoder[R], body: bytes) -> R:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        path = _PATH.search(message)
        if path is None:  # a required field is missing, say; msgspec names it in backticks
            missing = re.search(r"required field `(\w+)`", message)
            raise InvalidRequest(f"{message}.", missing.group(1) if missing else None) from error
        field = path.group(1)
        message = message[: path.start()]
        missing = re.search(r"required field `(\w+)`", message)
        param = ".".join(part for part in (field, missing and missing.group(1)) if part) or None
        raise InvalidRequest(f"{field}: {message}." if field else f"{message}.", param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error


def _refuse_what_is_not_served(request: NotServedYet) -> None:
    for field in NotServedYet.__struct_fields__:
        value = getattr(request, field)
        if value is None:
            continue
        # `0 == False` in Python; a 0 for logprobs does ask for something.
        neutral = NEUTRAL_VALUES.get(field, ())
        if not any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
            raise InvalidRequest(f"{field} is not supported yet with this value; leave it out.", field)


def _message(number: int, message: ChatMessage) -> dict[str, Any]:
    if message.tool_calls or message.tool_call_id is not None:
        raise InvalidRequest("Tool calls are not supported yet.", f"messages[{number}].tool_calls")
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text":
                raise InvalidRequest(
                    f"Content parts of type {part.type!r} are not supported by this model; it takes text.",
                    f"messages[{number}].content",
                )
        content = "\n".join(part.text or "" for part in content)
    if content is None:
        raise InvalidRequest("content must be a string or a list of text parts.", f"messages[{number}].content")
    rendered: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        rendered["name"] = message.name
    return rendered
