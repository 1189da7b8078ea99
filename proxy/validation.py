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
from proxy.rendering import ChatPrompt, CompletionPrompt, ContextLengthExceeded

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 1024
COMPLETION_DEFAULT_MAX_TOKENS = 16

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "priority": (0,),
    "add_special_tokens": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
}
"""Beside null, which always is: values of fields not served yet that ask for nothing."""


class ModelNotFound(InvalidRequest):
    """The client names a model that is not served here."""

    code = "model_not_found"


class GenerationRequest(msgspec.Struct, frozen=True):
    """One HTTP request for generation, checked. max_tokens: None takes `default_max_tokens`, or all that fits."""

    prompt: ChatPrompt | CompletionPrompt
    max_tokens: int | None
    default_max_tokens: int | None
    max_tokens_param: str
    n: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: list[str]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool

    def sampling(self, index: int) -> SamplingParams:
        """Of the `index`-th of the n sequences of one prompt. The seed stays in [0, 2**63)."""
        seed = secrets.randbits(63) if self.seed is None else (self.seed + index) % 2**63
        return SamplingParams(self.temperature, self.top_p, self.top_k, seed=seed)

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
        return StopConditions(max_tokens, self.stop_token_ids | (frozenset() if self.ignore_eos else eos_token_ids))


R = TypeVar("R")


class BodyDecoder:
    """Decodes and checks the two kinds of bodies."""

    def __init__(self, served_model_name: str) -> None:
        self._served_model_name = served_model_name
        self._completion = msgspec.json.Decoder(CompletionRequest)
        self._chat = msgspec.json.Decoder(ChatCompletionRequest)

    def completion(self, body: bytes) -> GenerationRequest:
        request = _decode(self._completion, body)
        prompt = CompletionPrompt(msgspec.Raw(bytes(request.prompt)))
        return self._check(request, prompt, request.max_tokens, "max_tokens", COMPLETION_DEFAULT_MAX_TOKENS)

    def chat(self, body: bytes) -> GenerationRequest:
        request = _decode(self._chat, body)
        if not request.messages:
            raise InvalidRequest("messages must hold at least one message.", "messages")
        messages = [_message(number, message) for number, message in enumerate(request.messages)]
        prompt = ChatPrompt(messages, request.add_generation_prompt is not False)
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
        temperature = 1.0 if request.temperature is None else request.temperature
        _require(0 <= temperature <= 2, "temperature", "in [0, 2]", temperature)
        top_p = 1.0 if request.top_p is None else request.top_p
        _require(0 < top_p <= 1, "top_p", "in (0, 1]", top_p)
        top_k = 0 if request.top_k in (None, -1) else request.top_k  # -1 keeps all, as in vLLM
        assert top_k is not None
        _require(0 <= top_k < 2**31, "top_k", "0 or -1 (keep all) or more, below 2**31", top_k)
        n = 1 if request.n is None else request.n
        _require(1 <= n <= MAX_N, "n", f"from 1 to {MAX_N}", n)
        if request.seed is not None:
            _require(-(2**63) <= request.seed < 2**63, "seed", "a 64-bit integer", request.seed)
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        _require(len(stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings", len(stop))
        for text in stop:
            _require(0 < len(text) <= MAX_STOP_STRING_CHARACTERS, "stop", "strings of 1 to 1024 characters", text[:20])
        stop_token_ids = frozenset(request.stop_token_ids or ())
        _require(
            all(0 <= i < 2**31 for i in stop_token_ids) and len(stop_token_ids) <= 1024,
            "stop_token_ids",
            "at most 1024 token ids",
            f"{len(stop_token_ids)} numbers",
        )
        options = request.stream_options
        if options is not None and not request.stream:
            raise InvalidRequest("stream_options is only allowed together with stream.", "stream_options")
        return GenerationRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            default_max_tokens=default_max_tokens,
            max_tokens_param=max_tokens_param,
            n=n,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=request.seed,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(request.ignore_eos),
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


def _require(holds: bool, param: str, what: str, value: object) -> None:
    if not holds:
        raise InvalidRequest(f"{param} must be {what}, not {value!r}.", param)


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
