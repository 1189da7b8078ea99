"""Decodes request bodies and checks them. Every error names the field, what is wrong, and how to correct it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from tandem.protocol.messages.generation import SamplingParams
from tandem.proxy.api.chat_messages import template_message
from tandem.proxy.api.generation_request import EmbeddingOptions, GenerationRequest
from tandem.proxy.api.schema import (
    NEUTRAL_VALUES,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationFields,
    NotServed,
    TokenizeRequest,
)
from tandem.proxy.api.structured_output import plan_output, template_tool
from tandem.proxy.api.tool_formats import ToolFormat
from tandem.proxy.cluster.adapter_table import AdapterTable, NamedAdapter
from tandem.proxy.media.source import InvalidMedia, MediaSource
from tandem.proxy.text.embedding_defaults import EmbeddingDefaults
from tandem.proxy.text.model_text import RESERVED_VARIABLES
from tandem.proxy.text.prompt import ChatPrompt, CompletionPrompt
from tandem.proxy.text.sampling_defaults import SamplingDefaults
from tandem.runtime.errors import InvalidRequest

COMPLETION_DEFAULT_MAX_TOKENS = 16
_ERROR_PATH = re.compile(r" - at (?:`key` in )?`\$(?:\.([^`]*?))?(?:\[\.\.\.\])?`$")
_MISSING_FIELD = re.compile(r"required field `(\w+)`")

_SAME_IN_SAMPLING = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_SAME_IN_REQUEST = (
    "n", "seed", "stop_token_ids", "min_tokens", "prompt_logprobs", "echo", "bad_words", "priority", "request_id",
    "timeout", "return_tokens_as_token_ids", "include_stop_str_in_output", "truncate_prompt_tokens", "cache_salt",
    "stream", "return_token_ids",
)  # fmt: skip
"""Fields of a body that `SamplingParams` and `GenerationRequest` have too. Null means their default."""

R = TypeVar("R", CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest, EmbeddingRequest)


class ModelNotFound(InvalidRequest):
    """The request names a model that this server does not serve."""

    code = "model_not_found"


class BodyDecoder:
    """Decodes and checks bodies. All methods raise InvalidRequest.

    trust_chat_template: clients may send their own chat templates. max_media: images and videos per chat; 0 if the
    model takes text only. max_sequences: prompts times n.
    """

    def __init__(
        self,
        served_model_name: str,
        trust_chat_template: bool = False,
        tool_format: ToolFormat | None = None,
        max_media: int = 0,
        sampling_defaults: SamplingDefaults = SamplingDefaults(),  # noqa: B008  # frozen
        max_sequences: int = 1024,
        adapters: AdapterTable | None = None,
        embedding_defaults: EmbeddingDefaults = EmbeddingDefaults(),  # noqa: B008  # frozen
    ) -> None:
        self._max_sequences = max_sequences
        self._adapters = adapters or AdapterTable(None, [], served_model_name)
        self._embedding_defaults = embedding_defaults
        self._embedding = msgspec.json.Decoder(EmbeddingRequest)
        self._sampling_defaults = sampling_defaults
        self._max_media = max_media
        self._served_model_name = served_model_name
        self._trust_chat_template = trust_chat_template
        self._tool_format = tool_format or ToolFormat()
        self._completion = msgspec.json.Decoder(CompletionRequest)
        self._chat = msgspec.json.Decoder(ChatCompletionRequest)
        self._tokenize = msgspec.json.Decoder(TokenizeRequest)
        self._detokenize = msgspec.json.Decoder(DetokenizeRequest)

    def completion(self, body: bytes) -> GenerationRequest:
        request = self._decode(self._completion, body)
        prompt = CompletionPrompt(msgspec.Raw(bytes(request.prompt)), request.add_special_tokens is not False)
        max_prompts = self._max_sequences // (request.n or 1)
        if prompt.num_prompts(max_prompts) > max_prompts:
            raise InvalidRequest(
                f"The request asks for more than {self._max_sequences} sequences (prompts times n), the limit; "
                "send fewer prompts in one request, or lower n.",
                "prompt" if max_prompts else "n",
            )
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise InvalidRequest(
                f"best_of must equal n ({request.n or 1}): all choices are returned; select among them in the client.",
                "best_of",
            )
        if request.max_tokens == 0 and not request.echo:
            raise InvalidRequest("max_tokens must be at least 1, or 0 together with echo.", "max_tokens")
        return self._check(request, prompt, request.max_tokens, "max_tokens", COMPLETION_DEFAULT_MAX_TOKENS)

    def chat(self, body: bytes) -> GenerationRequest:
        request = self._decode(self._chat, body)
        if request.echo:
            raise InvalidRequest("echo is not supported for chats; leave it out.", "echo")
        prompt = self._chat_prompt(request)
        if request.max_completion_tokens is not None:
            return self._check(request, prompt, request.max_completion_tokens, "max_completion_tokens", None)
        return self._check(request, prompt, request.max_tokens, "max_tokens", None)

    def tokenize(self, body: bytes) -> tuple[str | ChatPrompt, bool, bool]:
        """Returns the prompt, whether the tokeniser adds its own tokens, and whether the answer has strings."""
        request = self._decode(self._tokenize, body)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("Send either prompt (a string) or messages (a list).", "prompt")
        if request.prompt is not None:
            return request.prompt, request.add_special_tokens is not False, bool(request.return_token_strs)
        prompt = self._chat_prompt(request)
        if prompt.media:
            raise InvalidMedia(
                "/tokenize supports text only; the usage of a chat completion shows how many tokens its media have.",
                prompt.media[0].param,
            )
        return prompt, prompt.add_special_tokens, bool(request.return_token_strs)

    def detokenize(self, body: bytes) -> list[int]:
        """Returns the token ids."""
        request = self._decode(self._detokenize, body)
        return request.tokens

    def _decode(self, decoder: msgspec.json.Decoder[R], body: bytes) -> R:
        try:
            request = decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _invalid_field(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
        if self._is_unknown(request.model):
            raise ModelNotFound(
                f"The model {request.model!r} does not exist; this server serves {self._served_model_name!r}.", "model"
            )
        return request

    def _is_unknown(self, model: str | None) -> bool:
        return model is not None and model != self._served_model_name and self._adapters.get(model) is None

    def _adapter(self, model: str | None) -> NamedAdapter | None:
        return None if model is None or model == self._served_model_name else self._adapters.get(model)

    def embedding(self, body: bytes) -> GenerationRequest:
        request = self._decode(self._embedding, body)
        defaults = self._embedding_defaults
        defaults.check()
        prompt = CompletionPrompt(msgspec.Raw(bytes(request.input)), request.add_special_tokens is not False, "input")
        if prompt.num_prompts(self._max_sequences) > self._max_sequences:
            raise InvalidRequest(
                f"The request has more than {self._max_sequences} inputs, the limit; send fewer in one request.",
                "input",
            )
        if request.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1, not 0.", "truncate_prompt_tokens")
        if request.dimensions is not None:
            defaults.check_dimensions(request.dimensions)
        normalize = next(
            (each for each in (request.normalize, request.use_activation) if each is not None), defaults.normalize
        )
        options = EmbeddingOptions(defaults.pooling, normalize, request.dimensions, request.encoding_format == "base64")
        return GenerationRequest(
            prompt=prompt,
            max_tokens=1,
            default_max_tokens=None,
            max_tokens_param="input",
            base_sampling=SamplingParams(temperature=0.0),
            stop=[],
            ignore_eos=True,
            num_prompt_logprobs=None,
            is_prompt_only=True,
            grammar_param="",
            tool_format=None,
            skip_special_tokens=True,
            include_usage=False,
            continuous_usage=False,
            adapter=self._adapter(request.model),
            embedding=options,
            **_given(request, ("priority", "request_id", "truncate_prompt_tokens", "cache_salt")),
        )

    def _chat_prompt(self, request: ChatCompletionRequest | TokenizeRequest) -> ChatPrompt:
        if request.chat_template is not None and not self._trust_chat_template:
            raise InvalidRequest(
                "chat_template is not enabled on this server; leave it out, or start the server with "
                "--trust-request-chat-template.",
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
                f"chat_template_kwargs must not contain {reserved[0]!r}, which the server sets itself; remove it.",
                "chat_template_kwargs",
            )
        if request.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", request.reasoning_effort)
        media: list[MediaSource] | None = [] if self._max_media else None
        messages = [template_message(index, message, media) for index, message in enumerate(request.messages or ())]
        if media is not None and len(media) > self._max_media:
            raise media[self._max_media].refused(
                f"the limit is {self._max_media} images and videos per request, but this one has {len(media)}"
            )
        return ChatPrompt(
            messages=messages,
            media=media or [],
            add_generation_prompt=not continues and request.add_generation_prompt is not False,
            add_special_tokens=bool(request.add_special_tokens),
            continue_final_message=continues,
            template=request.chat_template,
            variables=variables,
            documents=request.documents,
            tools=[template_tool(tool) for tool in request.tools or ()] or None,
        )

    def _check(
        self,
        request: GenerationFields,
        prompt: ChatPrompt | CompletionPrompt,
        max_tokens: int | None,
        max_tokens_param: str,
        default_max_tokens: int | None,
    ) -> GenerationRequest:
        _refuse_unsupported_fields(request)
        request = self._sampling_defaults.fill(request)
        is_prompt_only = max_tokens == 0
        if is_prompt_only:
            max_tokens = 1
        min_tokens = request.min_tokens or 0
        if max_tokens is not None and min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {min_tokens}, but must be at most {max_tokens_param}, which is {max_tokens}.",
                "min_tokens",
            )
        if request.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1, not 0.", "truncate_prompt_tokens")
        options = request.stream_options
        if options is not None and not request.stream:
            raise InvalidRequest(
                "stream_options requires stream; set stream to true or leave it out.", "stream_options"
            )
        output = plan_output(request, self._tool_format)
        if isinstance(prompt, ChatPrompt):
            prompt = msgspec.structs.replace(prompt, tools=output.tools)
        sampling = _sampling_params(request, output.grammar)
        return GenerationRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            default_max_tokens=default_max_tokens,
            max_tokens_param=max_tokens_param,
            base_sampling=sampling,
            adapter=self._adapter(request.model),
            stop=[request.stop] if isinstance(request.stop, str) else request.stop or [],
            # A completed grammar allows no token but the end of the sequence.
            ignore_eos=bool(request.ignore_eos) and output.grammar is None,
            num_prompt_logprobs=_num_prompt_logprobs(request, sampling.logprobs),
            is_prompt_only=is_prompt_only,
            grammar_param=output.param or "",
            tool_format=self._tool_format if output.may_call else None,
            skip_special_tokens=request.skip_special_tokens is not False
            and not (output.may_call and self._tool_format.has_special_markers),
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            **_given(request, _SAME_IN_REQUEST),
        )


def _given(request: GenerationFields | EmbeddingRequest, names: Iterable[str]) -> dict[str, Any]:
    """Returns the fields that are not null."""
    return {name: value for name in names if (value := getattr(request, name, None)) is not None}


def _sampling_params(request: GenerationFields, grammar: str | None) -> SamplingParams:
    """Returns all but the seed and the bad words, which are tokenised later."""
    return SamplingParams(
        **_given(request, _SAME_IN_SAMPLING),
        top_k=max(request.top_k or 0, 0),  # -1 also means all
        logit_bias=tuple((int(token_id), bias) for token_id, bias in (request.logit_bias or {}).items()),
        allowed_token_ids=tuple(sorted(set(request.allowed_token_ids or ()))),
        logprobs=_num_logprobs(request),
        grammar=grammar,
    )


def _num_logprobs(request: GenerationFields) -> int | None:
    if isinstance(request, ChatCompletionRequest):
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequest("top_logprobs requires logprobs; set logprobs to true.", "top_logprobs")
        return (request.top_logprobs or 0) if request.logprobs else None
    assert isinstance(request, CompletionRequest)
    return None if request.logprobs is None or request.logprobs is False else int(request.logprobs)


def _num_prompt_logprobs(request: GenerationFields, num_logprobs: int | None) -> int | None:
    requested = request.prompt_logprobs
    if requested is not None and request.stream:
        raise InvalidRequest(
            "prompt_logprobs is not available for streams; leave it out or set stream to false.", "prompt_logprobs"
        )
    if not (isinstance(request, CompletionRequest) and request.echo) or num_logprobs is None:
        return requested
    return max(num_logprobs, requested or 0)


def invalid_body(error: msgspec.DecodeError) -> InvalidRequest:
    """Returns the client's error for a body that cannot be decoded."""
    if isinstance(error, msgspec.ValidationError):
        return _invalid_field(str(error))
    return InvalidRequest(f"The body is not valid JSON: {error}.")


def _invalid_field(message: str) -> InvalidRequest:
    """message: msgspec's, which ends with the path of the field."""
    path = _ERROR_PATH.search(message)
    field = path.group(1) if path is not None else None
    message = message if path is None else message[: path.start()]
    missing = _MISSING_FIELD.search(message)
    param = ".".join(name for name in (field, missing and missing.group(1)) if name) or None
    return InvalidRequest(f"{field}: {message}." if field else f"{message}.", param)


def _refuse_unsupported_fields(request: NotServed) -> None:
    for field, neutral in NEUTRAL_VALUES.items():
        value = getattr(request, field)
        if value is None:
            continue
        # In Python `0 == False`, but 0 is not a neutral value of a boolean field.
        if not any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
            raise InvalidRequest(f"{field} is not supported with this value; leave it out.", field)
