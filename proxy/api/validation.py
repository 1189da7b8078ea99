"""Decodes request bodies and checks them. Every error names the field, what is wrong, and how to correct it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import msgspec

from tandem.protocol.messages.generation import SamplingParams
from tandem.proxy.api.chat_messages import ChatMessage, template_message
from tandem.proxy.api.field_errors import invalid_field, shown_value
from tandem.proxy.api.generation_request import ALL_LOGPROBS, EmbeddingOptions, GenerationRequest
from tandem.proxy.api.messages_request import CountTokensRequest, MessageRequest, to_chat
from tandem.proxy.api.responses_request import InputItem, ResponseRequest, options_of
from tandem.proxy.api.responses_request import to_chat as response_to_chat
from tandem.proxy.api.schema import (
    DECIMAL_ID,
    NEUTRAL_VALUES,
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    ChatFields,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationFields,
    InvocationKind,
    NotServed,
    TokenizeRequest,
)
from tandem.proxy.api.structured_output import plan_output, template_tool
from tandem.proxy.cluster.adapter_table import AdapterTable, NamedAdapter
from tandem.proxy.media.source import InvalidMedia, MediaSource
from tandem.proxy.parsers.reasoning import ReasoningFormat
from tandem.proxy.parsers.tool_formats import ToolFormat
from tandem.proxy.text.embedding_defaults import EmbeddingDefaults
from tandem.proxy.text.model_text import RESERVED_VARIABLES
from tandem.proxy.text.prompt import ChatBatch, ChatPrompt, CompletionPrompt
from tandem.proxy.text.sampling_defaults import SamplingDefaults
from tandem.runtime.errors import InvalidRequest

COMPLETION_DEFAULT_MAX_TOKENS = 16
_TOKEN_ID = re.compile(DECIMAL_ID)

_SAME_IN_SAMPLING = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_SAME_IN_REQUEST = (
    "n", "seed", "stop_token_ids", "min_tokens", "bad_words", "priority", "request_id",
    "timeout", "return_tokens_as_token_ids", "include_stop_str_in_output", "truncate_prompt_tokens", "truncation_side",
    "cache_salt", "stream", "return_token_ids", "include_reasoning", "use_beam_search", "length_penalty",
)  # fmt: skip
"""Fields of a body that `SamplingParams` and `GenerationRequest` have too. Null means their default."""

_NOT_WITH_BEAMS = {
    "stream": False, "stop": None, "stop_token_ids": None, "min_tokens": 0, "presence_penalty": 0,
    "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": None, "allowed_token_ids": None, "bad_words": None,
    "prompt_logprobs": None, "logprob_token_ids": None, "tools": None, "thinking_token_budget": -1,
}  # fmt: skip
"""Fields that a beam search does not take, and their neutral values."""
_NOT_IN_BATCHES = {"stream": False, "n": 1, "use_beam_search": False, "tools": None}
"""The same for batches of chats."""

R = TypeVar(
    "R",
    CompletionRequest,
    ChatCompletionRequest,
    BatchChatCompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    MessageRequest,
    CountTokensRequest,
    ResponseRequest,
)


class ModelNotFound(InvalidRequest):
    """The request names a model that this server does not serve."""

    code = "model_not_found"


class BodyDecoder:
    """Decodes and checks bodies. All methods raise InvalidRequest.

    trust_chat_template: clients may send their own chat templates. max_media: images and videos per chat; 0 if the
    model takes text only. max_sequences: prompts times n. max_logprobs: top tokens that a request may ask for; -1 for
    all.
    """

    def __init__(
        self,
        served_model_name: str,
        trust_chat_template: bool = False,
        tool_format: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        max_media: int = 0,
        sampling_defaults: SamplingDefaults = SamplingDefaults(),  # noqa: B008  # frozen
        max_sequences: int = 1024,
        max_logprobs: int = 20,
        adapters: AdapterTable | None = None,
        embedding_defaults: EmbeddingDefaults = EmbeddingDefaults(),  # noqa: B008  # frozen
    ) -> None:
        self._max_sequences = max_sequences
        self._max_logprobs = max_logprobs
        self._max_sequences = max_sequences
        self._adapters = adapters or AdapterTable(None, [], served_model_name)
        self._embedding_defaults = embedding_defaults
        self._embedding = msgspec.json.Decoder(EmbeddingRequest)
        self._sampling_defaults = sampling_defaults
        self._max_media = max_media
        self._served_model_name = served_model_name
        self._trust_chat_template = trust_chat_template
        self._tool_format = tool_format or ToolFormat()
        self._reasoning = reasoning
        self._completion = msgspec.json.Decoder(CompletionRequest)
        self._chat = msgspec.json.Decoder(ChatCompletionRequest)
        self._chat_batch = msgspec.json.Decoder(BatchChatCompletionRequest)
        self._response = msgspec.json.Decoder(ResponseRequest)
        self._message = msgspec.json.Decoder(MessageRequest)
        self._count_tokens = msgspec.json.Decoder(CountTokensRequest)
        self._tokenize = msgspec.json.Decoder(TokenizeRequest)
        self._detokenize = msgspec.json.Decoder(DetokenizeRequest)

    def completion(self, body: bytes) -> GenerationRequest:
        request = self._decode(self._completion, body)
        prompt = CompletionPrompt(msgspec.Raw(bytes(request.prompt)), request.add_special_tokens is not False)
        self._check_num_prompts(prompt.num_prompts, request.n or 1, "prompt")
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise InvalidRequest(
                f"best_of must equal n ({request.n or 1}): all choices are returned; select among them in the client.",
                "best_of",
            )
        if request.max_tokens == 0 and not request.echo:
            raise InvalidRequest("max_tokens is 0, but must be at least 1, or 0 together with echo.", "max_tokens")
        checked = self._check(request, prompt, request.max_tokens, "max_tokens", COMPLETION_DEFAULT_MAX_TOKENS)
        return msgspec.structs.replace(checked, echo=bool(request.echo))

    def chat(self, body: bytes) -> GenerationRequest:
        return self._checked_chat(self._decode(self._chat, body))

    def message(self, body: bytes) -> GenerationRequest:
        request = self._decode(self._message, body)
        checked = self._checked_chat(*to_chat(request, self._reasoning is not None))
        # An answer may end where the model's context does, so that clients need not know the length of their prompt.
        return msgspec.structs.replace(checked, default_max_tokens=request.max_tokens, max_tokens_param="max_tokens")

    def response(self, body: bytes, history: Callable[[str], list[InputItem]]) -> GenerationRequest:
        """history: returns the items of a stored response and of those before it; may raise InvalidRequest."""
        request = self._decode(self._response, body)
        before = history(request.previous_response_id) if request.previous_response_id is not None else []
        checked = self._checked_chat(*response_to_chat(request, before))
        param = checked.max_tokens_param.replace("max_completion_tokens", "max_output_tokens")
        return msgspec.structs.replace(checked, response=options_of(request), max_tokens_param=param)

    def counted_prompt(self, body: bytes) -> ChatPrompt:
        """Returns the prompt whose tokens are to be counted."""
        request = self._decode(self._count_tokens, body)
        prompt = self._checked_chat(*to_chat(request, self._reasoning is not None)).prompt
        assert isinstance(prompt, ChatPrompt)
        if prompt.media:
            raise InvalidMedia(
                "count_tokens supports text only; the usage of a message shows how many tokens its images have.",
                prompt.media[0].param,
            )
        return prompt

    def _checked_chat(self, request: ChatCompletionRequest, params: list[str] | None = None) -> GenerationRequest:
        prompt = self._chat_prompt(request, request.messages, params)
        return self._check_chat(request, prompt, [prompt])

    def chat_batch(self, body: bytes) -> GenerationRequest:
        request = self._decode(self._chat_batch, body)
        for field, neutral in _NOT_IN_BATCHES.items():
            if (value := getattr(request, field)) not in (None, neutral, []):
                raise InvalidRequest(
                    f"{field} is {shown_value(value)}, which batches of chats do not support; leave it out, or send "
                    "the chats one by one to /v1/chat/completions.",
                    field,
                )
        num_chats = len(request.messages)
        self._check_num_prompts(lambda most: min(num_chats, most + 1), 1, "messages")
        prompts = [
            self._chat_prompt(request, messages, [f"messages[{i}][{j}]" for j in range(len(messages))])
            for i, messages in enumerate(request.messages)
        ]
        for each in prompts:
            if each.media:
                raise each.media[0].refused("batches of chats take text only; send this chat to /v1/chat/completions")
        return self._check_chat(request, ChatBatch(prompts), prompts)

    def invocation(self, body: bytes) -> Literal["completion", "chat"]:
        """Returns what a request to `/invocations` is."""
        try:
            kind = msgspec.json.decode(body, type=InvocationKind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"The body is not a JSON object: {error}.") from error
        if (kind.messages is msgspec.UNSET) == (kind.prompt is msgspec.UNSET):
            raise InvalidRequest("Send either messages (a chat) or prompt (a completion).", "messages")
        return "completion" if kind.messages is msgspec.UNSET else "chat"

    def _check_num_prompts(self, num_prompts: Callable[[int], int], n: int, param: str) -> None:
        """num_prompts: counts the prompts up to one more than its argument."""
        max_prompts = self._max_sequences // n
        if (number := num_prompts(max_prompts)) > max_prompts:
            raise InvalidRequest(
                f"The request asks for more than {self._max_sequences} sequences (prompts times n: at least {number} "
                f"times {n}), the limit; send fewer prompts in one request, or lower n.",
                param if max_prompts else "n",
            )

    def _check_chat(
        self, request: ChatFields, prompt: ChatPrompt | ChatBatch, prompts: list[ChatPrompt]
    ) -> GenerationRequest:
        if request.max_completion_tokens is not None:
            checked = self._check(request, prompt, request.max_completion_tokens, "max_completion_tokens", None)
        else:
            checked = self._check(request, prompt, request.max_tokens, "max_tokens", None)
        return msgspec.structs.replace(
            checked,
            is_chat=True,
            roles=[each.answer_role for each in prompts],
            prefixes=[each.last_text if request.echo else "" for each in prompts],
        )

    def tokenize(self, body: bytes) -> tuple[str | ChatPrompt, bool, bool]:
        """Returns the prompt, whether the tokeniser adds its own tokens, and whether the answer has strings."""
        request = self._decode(self._tokenize, body)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("Send either prompt (a string) or messages (a list).", "prompt")
        if request.prompt is not None:
            return request.prompt, request.add_special_tokens is not False, bool(request.return_token_strs)
        prompt = self._chat_prompt(request, request.messages or [])
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
            raise invalid_field(str(error), body) from error
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
            reasoning=None,
            skip_special_tokens=True,
            include_usage=False,
            continuous_usage=False,
            adapter=self._adapter(request.model),
            embedding=options,
            **_given(request, ("priority", "request_id", "truncate_prompt_tokens", "cache_salt")),
        )

    def _chat_prompt(
        self, request: ChatFields | TokenizeRequest, given: list[ChatMessage], params: list[str] | None = None
    ) -> ChatPrompt:
        """params: names of the messages for errors; by default those of a chat completion."""
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
        params = params or [f"messages[{i}]" for i in range(len(given))]
        messages = [template_message(param, message, media) for param, message in zip(params, given, strict=True)]
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
        prompt: ChatPrompt | ChatBatch | CompletionPrompt,
        max_tokens: int | None,
        max_tokens_param: str,
        default_max_tokens: int | None,
    ) -> GenerationRequest:
        _refuse_unsupported_fields(request)
        self._check_logprobs(request)
        if request.use_beam_search:
            _check_beam_search(request, is_prompt_only=max_tokens == 0)
        request = self._sampling_defaults.fill(request)
        if isinstance(request, ChatFields):
            default_max_tokens = self._sampling_defaults.max_new_tokens
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
        if request.logit_bias:
            _check_token_ids(request.logit_bias)
        options = request.stream_options
        if options is not None and not request.stream:
            raise InvalidRequest(
                "stream_options requires stream; set stream to true or leave it out.", "stream_options"
            )
        budget = None if request.thinking_token_budget == -1 else request.thinking_token_budget
        if budget is not None and self._reasoning is None:
            raise InvalidRequest(
                f"thinking_token_budget is {budget}, but this server knows no thinking of its model; leave it out, or "
                "start the server with --reasoning-parser.",
                "thinking_token_budget",
            )
        reasoning = self._reasoning if isinstance(request, ChatFields) or budget is not None else None
        output = plan_output(request, self._tool_format)
        if request.use_beam_search and output.param is not None:
            raise InvalidRequest(f"{output.param} is not supported with use_beam_search; leave one out.", output.param)
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
            prompt_logprobs=None if request.stream else _num_top(request.prompt_logprobs),
            num_prompt_logprobs=_num_prompt_logprobs(request),
            is_prompt_only=is_prompt_only,
            grammar_param=output.param or "",
            tool_format=self._tool_format.with_tools(output.arguments or {}) if output.may_call else None,
            reasoning=reasoning,
            skip_special_tokens=request.skip_special_tokens is not False
            and not (output.may_call and self._tool_format.has_special_markers)
            and not (reasoning is not None and reasoning.has_special_markers),
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None
            and bool(options.include_usage)
            and bool(options.continuous_usage_stats),
            thinking_token_budget=budget,
            **_given(request, _SAME_IN_REQUEST),
        )

    def _check_logprobs(self, request: GenerationFields) -> None:
        asked = [("prompt_logprobs", request.prompt_logprobs)]
        if isinstance(request, ChatFields):
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
            if number is not None and number > self._max_logprobs != -1:
                raise InvalidRequest(
                    f"{field} is {number}, but this server's limit is {self._max_logprobs} (--max-logprobs).", field
                )
        if request.stream and request.prompt_logprobs:
            raise InvalidRequest(
                "prompt_logprobs is not available for streams; leave it out or set stream to false.", "prompt_logprobs"
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
        logprobs=_num_reported(request),
        logprob_token_ids=tuple(dict.fromkeys(request.logprob_token_ids or ())),
        grammar=grammar,
    )


def _num_top(number: int | None) -> int | None:
    """Returns the number of top tokens that a field asks for; -1 means all."""
    return ALL_LOGPROBS if number == -1 else number


def _num_logprobs(request: GenerationFields) -> int | None:
    """Returns how many top tokens the answer shows for each token; None for no logprobs."""
    if isinstance(request, ChatFields):
        number = (request.top_logprobs or 0) if request.logprobs in (True, "true") else None
    else:
        assert isinstance(request, CompletionRequest)
        number = None if request.logprobs is None or request.logprobs is False else int(request.logprobs)
    return _num_top(number)


def _num_reported(request: GenerationFields) -> int | None:
    """Returns how many top tokens the workers report."""
    named = request.logprob_token_ids
    return 1 + len(set(named)) if named else _num_logprobs(request)


def _num_prompt_logprobs(request: GenerationFields) -> int | None:
    requested, num_logprobs = None if request.stream else _num_top(request.prompt_logprobs), _num_logprobs(request)
    if not (isinstance(request, CompletionRequest) and request.echo) or num_logprobs is None:
        return requested
    return max(num_logprobs, requested or 0)


def _check_token_ids(logit_bias: dict[str, float]) -> None:
    wrong = [token_id for token_id in logit_bias if not _TOKEN_ID.fullmatch(token_id)]
    if wrong:
        raise InvalidRequest(
            f"The keys of logit_bias must be token ids (decimal numbers), not {shown_value(wrong)}.", "logit_bias"
        )


def _check_beam_search(request: GenerationFields, is_prompt_only: bool) -> None:
    for field, neutral in _NOT_WITH_BEAMS.items():
        if (value := getattr(request, field, None)) not in (None, neutral, [], {}):
            raise InvalidRequest(
                f"{field} is {shown_value(value)}, which is not supported with use_beam_search; leave one out.", field
            )
    if (
        isinstance(request, CompletionRequest)
        and request.echo
        and (is_prompt_only or _num_logprobs(request) is not None)
    ):
        raise InvalidRequest(
            "echo with use_beam_search repeats the prompt without logprobs and before an answer; leave one out.", "echo"
        )


def _refuse_unsupported_fields(request: NotServed) -> None:
    for field, neutral in NEUTRAL_VALUES.items():
        value = getattr(request, field)
        if value is None:
            continue
        # In Python `0 == False`, but 0 is not a neutral value of a boolean field.
        if not any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
            raise InvalidRequest(f"{field} is not supported with this value; leave it out.", field)
