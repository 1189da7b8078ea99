"""Request bodies to `GenerationRequest`, or InvalidRequest naming the field. What cannot be served is refused here."""

from __future__ import annotations

import re
import secrets
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from tandem.protocol.messages.generation import SamplingParams, StopConditions
from tandem.proxy.api.chat_messages import template_message
from tandem.proxy.api.sampling_fields import num_prompt_logprobs, require, sampling_params
from tandem.proxy.api.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    NotServed,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from tandem.proxy.api.structured_output import plan_output, shown_tool
from tandem.proxy.api.tool_formats import ToolFormat
from tandem.proxy.cluster.registry import ModelLimits
from tandem.proxy.media.lease import MediaLease
from tandem.proxy.media.source import InvalidMedia, MediaSource
from tandem.proxy.text.model_text import RESERVED_VARIABLES
from tandem.proxy.text.rendering import (
    AnyPrompt,
    ChatPrompt,
    CompletionPrompt,
    ContextLengthExceeded,
)
from tandem.proxy.text.sampling_defaults import SamplingDefaults
from tandem.runtime.errors import InvalidRequest

COMPLETION_DEFAULT_MAX_TOKENS = 16

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "truncation_side": ("left",),
    "watermarking": (False,),
    "media_io_kwargs": ({},),
    "return_prompt_text": (False,),
}
"""Beside null, which always is: values of fields not served that ask for nothing."""


class ModelNotFound(InvalidRequest):
    """The client names a model that is not served here."""

    code = "model_not_found"


class GenerationRequest(msgspec.Struct, frozen=True):
    """One HTTP request for generation, checked.

    max_tokens: None takes `default_max_tokens`, or all that fits. base_sampling: without a seed. seed: of the first of
    the n sequences of a prompt. prompt_logprobs: how many top tokens the client wants to see for each of the prompt;
    num_prompt_logprobs: how many to ask prefill for, which an echo may need too. is_prompt_only: the client wants to
    see its prompt and nothing generated; max_tokens is 1 then, because workers generate at least one. bad_words: of
    `base_sampling`, before they are tokenised. priority: less is served first. request_id: "" for a new one.
    timeout_s: None for the server's limit, from arrival to the last token.
    grammar_param: the field that `base_sampling.grammar` comes from. tool_format: of the calls in the answer.
    media_lease: to be released when the request has ended.
    """

    prompt: AnyPrompt
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
    is_prompt_only: bool
    bad_words: list[str]
    priority: int
    request_id: str
    timeout_s: float | None
    tokens_as_ids: bool
    grammar_param: str
    tool_format: ToolFormat | None
    skip_special_tokens: bool
    include_stop_string: bool
    truncate_prompt_tokens: int | None
    cache_salt: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    media_lease: MediaLease | None = None

    def samplings(self) -> list[SamplingParams]:
        """Of the n sequences of one prompt. The seeds stay in [0, 2**63)."""
        first = secrets.randbits(63) if self.seed is None else self.seed
        return [msgspec.structs.replace(self.base_sampling, seed=(first + i) % 2**63) for i in range(self.n)]

    def check_vocabulary(self, limits: ModelLimits) -> None:
        """Raises InvalidRequest when the client biases, allows or stops at tokens that the model does not have."""
        sampling = self.base_sampling
        for param, token_ids in (
            ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
            ("allowed_token_ids", sampling.allowed_token_ids),
        ):
            largest = max(token_ids, default=0)
            require(largest < limits.vocab_size, param, f"token ids below {limits.vocab_size}", largest)

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
        if self.base_sampling.grammar is not None and not stop_token_ids:
            raise InvalidRequest(
                f"{self.grammar_param} needs a token that ends the answer, and this model names none; give one in "
                f"stop_token_ids.",
                self.grammar_param,
            )
        return StopConditions(max_tokens, stop_token_ids, self.min_tokens)


class TokenizeRequest(msgspec.Struct, frozen=True):
    prompt: str | ChatPrompt
    add_special_tokens: bool
    return_token_strs: bool


class _TokenizeKind(msgspec.Struct):
    prompt: msgspec.Raw | UnsetType = UNSET
    messages: msgspec.Raw | UnsetType = UNSET


R = TypeVar("R")


class BodyDecoder:
    """Decodes and checks the bodies. trust_chat_template: clients may bring templates of their own.

    max_media: images and videos in one chat; 0 where the model takes text only.
    """

    def __init__(
        self,
        served_model_name: str,
        trust_chat_template: bool = False,
        tool_format: ToolFormat | None = None,
        max_media: int = 0,
        sampling_defaults: SamplingDefaults = SamplingDefaults(),  # noqa: B008  # frozen
    ) -> None:
        self._sampling_defaults = sampling_defaults
        self._max_media = max_media
        self._served_model_name = served_model_name
        self._trust_chat_template = trust_chat_template
        self._tool_format = tool_format or ToolFormat()
        self._completion = msgspec.json.Decoder(CompletionRequest)
        self._chat = msgspec.json.Decoder(ChatCompletionRequest)
        self._tokenize_kind = msgspec.json.Decoder(_TokenizeKind)
        self._tokenize_text = msgspec.json.Decoder(TokenizeTextRequest)
        self._tokenize_chat = msgspec.json.Decoder(TokenizeChatRequest)
        self._detokenize = msgspec.json.Decoder(DetokenizeRequest)

    def completion(self, body: bytes) -> GenerationRequest:
        request = _decode(self._completion, body)
        self._check_model(request.model)
        prompt = CompletionPrompt(msgspec.Raw(bytes(request.prompt)), request.add_special_tokens is not False)
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise InvalidRequest(
                f"best_of must equal n, which is {request.n or 1}: all choices are told; choose among them yourself.",
                "best_of",
            )
        if request.max_tokens == 0 and not request.echo:
            raise InvalidRequest("max_tokens must be at least 1, or 0 together with echo.", "max_tokens")
        return self._check(request, prompt, request.max_tokens, "max_tokens", COMPLETION_DEFAULT_MAX_TOKENS)

    def chat(self, body: bytes) -> GenerationRequest:
        request = _decode(self._chat, body)
        self._check_model(request.model)
        if request.echo:
            raise InvalidRequest("echo is not supported for chats; the last message is yours already.", "echo")
        prompt = self._chat_prompt(request)
        if request.max_completion_tokens is not None:
            return self._check(request, prompt, request.max_completion_tokens, "max_completion_tokens", None)
        return self._check(request, prompt, request.max_tokens, "max_tokens", None)

    def tokenize(self, body: bytes) -> TokenizeRequest:
        kind = _decode(self._tokenize_kind, body)
        if (kind.prompt is UNSET) == (kind.messages is UNSET):
            raise InvalidRequest("Send either prompt, a string, or messages, a list.", "prompt")
        if kind.messages is UNSET:
            text = _decode(self._tokenize_text, body)
            self._check_model(text.model)
            return TokenizeRequest(text.prompt, text.add_special_tokens is not False, bool(text.return_token_strs))
        chat = _decode(self._tokenize_chat, body)
        self._check_model(chat.model)
        prompt = self._chat_prompt(chat)
        if prompt.media:
            raise InvalidMedia(
                "Only text is tokenised here; how many tokens an image takes is told in the usage of an answer.",
                prompt.media[0].param,
            )
        return TokenizeRequest(prompt, bool(chat.add_special_tokens), bool(chat.return_token_strs))

    def detokenize(self, body: bytes) -> list[int]:
        """The token ids."""
        request = _decode(self._detokenize, body)
        self._check_model(request.model)
        return request.tokens

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._served_model_name:
            raise ModelNotFound(
                f"The model {model!r} does not exist; this server has {self._served_model_name!r}.", "model"
            )

    def _chat_prompt(self, request: ChatCompletionRequest | TokenizeChatRequest) -> ChatPrompt:
        if request.chat_template is not None and not self._trust_chat_template:
            raise InvalidRequest(
                "This server renders the model's own chat template alone; leave chat_template out, or have it started "
                "with --trust-request-chat-template.",
                "chat_template",
            )
        continues = bool(request.continue_final_message)
        if continues and request.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false.",
                "continue_final_message",
            )
        variables = dict(request.chat_template_kwargs or {})
        if reserved := sorted(RESERVED_VARIABLES & variables.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs may not set {reserved[0]!r}, which is a field or the server's own.",
                "chat_template_kwargs",
            )
        if request.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", request.reasoning_effort)
        media: list[MediaSource] | None = [] if self._max_media else None
        messages = [template_message(number, message, media) for number, message in enumerate(request.messages)]
        if media is not None and len(media) > self._max_media:
            first = media[self._max_media]
            raise first.refused(f"a request may bring {self._max_media} images and videos, this one has {len(media)}")
        return ChatPrompt(
            messages=messages,
            media=media or [],
            add_generation_prompt=not continues and request.add_generation_prompt is not False,
            add_special_tokens=bool(request.add_special_tokens),
            continue_final_message=continues,
            template=request.chat_template,
            variables=variables,
            documents=request.documents,
            tools=[shown_tool(tool) for tool in request.tools or ()] or None,
        )

    def _check(
        self,
        request: GenerationFields,
        prompt: ChatPrompt | CompletionPrompt,
        max_tokens: int | None,
        max_tokens_param: str,
        default_max_tokens: int | None,
    ) -> GenerationRequest:
        _refuse_what_is_not_served(request)
        request = self._sampling_defaults.fill(request)
        is_prompt_only = max_tokens == 0
        if is_prompt_only:
            max_tokens = 1
        min_tokens = request.min_tokens or 0
        most = 2**31 if max_tokens is None else max_tokens
        require(min_tokens <= most, "min_tokens", f"from 0 to {max_tokens_param}", min_tokens)
        truncate = request.truncate_prompt_tokens
        require(truncate != 0, "truncate_prompt_tokens", "1 or more, or -1", truncate)
        output = plan_output(request, self._tool_format)
        if isinstance(prompt, ChatPrompt):
            prompt = msgspec.structs.replace(prompt, tools=output.tools)
        sampling = sampling_params(request, output.grammar)
        options = request.stream_options
        if options is not None and not request.stream:
            raise InvalidRequest("stream_options is only allowed together with stream.", "stream_options")
        return GenerationRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            default_max_tokens=default_max_tokens,
            max_tokens_param=max_tokens_param,
            n=1 if request.n is None else request.n,
            base_sampling=sampling,
            seed=request.seed,
            stop=[request.stop] if isinstance(request.stop, str) else request.stop or [],
            stop_token_ids=frozenset(request.stop_token_ids or ()),
            min_tokens=min_tokens,
            # A grammar that has come to its end leaves nothing else to say.
            ignore_eos=bool(request.ignore_eos) and output.grammar is None,
            num_prompt_logprobs=num_prompt_logprobs(request, sampling.logprobs),
            prompt_logprobs=request.prompt_logprobs,
            echo=isinstance(request, CompletionRequest) and bool(request.echo),
            is_prompt_only=is_prompt_only,
            bad_words=request.bad_words or [],
            priority=request.priority or 0,
            request_id=request.request_id or "",
            timeout_s=request.timeout,
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
            grammar_param=output.param or "",
            tool_format=self._tool_format if output.calls else None,
            skip_special_tokens=request.skip_special_tokens is not False
            and not (output.calls and self._tool_format.has_special_markers),
            include_stop_string=bool(request.include_stop_str_in_output),
            truncate_prompt_tokens=truncate,
            cache_salt=request.cache_salt or "",
            stream=bool(request.stream),
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            return_token_ids=bool(request.return_token_ids),
        )


_PATH = re.compile(r" - at (?:`key` in )?`\$(?:\.([^`]*?))?(?:\[\.\.\.\])?`$")


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


def _refuse_what_is_not_served(request: NotServed) -> None:
    for field in NotServed.__struct_fields__:
        value = getattr(request, field)
        if value is None:
            continue
        # `0 == False` in Python; a 0 for logprobs does ask for something.
        neutral = NEUTRAL_VALUES.get(field, ())
        if not any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
            raise InvalidRequest(f"{field} is not supported with this value; leave it out.", field)
