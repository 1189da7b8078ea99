"""Decodes request bodies and checks them. Every error names the field, what is wrong, and how to correct it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tandem.protocol.messages.sampling import SamplingParams
from tandem.proxy.admission.admission import MAX_INPUTS
from tandem.proxy.api.chat_prompts import ChatPromptBuilder
from tandem.proxy.api.field_checks import (
    FEW_STOP_STRINGS,
    MAX_STOP_SEARCHES,
    check_beam_search,
    check_logprobs,
    check_stop_searches,
    check_stop_strings,
    check_truncation,
    decode_body,
    given_fields,
    num_prompt_logprobs,
    num_top,
    refuse_unsupported,
    sampling_params,
)
from tandem.proxy.api.generation_request import EmbeddingOptions, GenerationRequest
from tandem.proxy.api.messages_api.messages_request import (
    CountTokensRequest,
    MessageRequest,
    skip_blocks,
    to_chat,
)
from tandem.proxy.api.request_settings import RequestSettings
from tandem.proxy.api.responses_api.responses_chat import ResponseTools, without_references, without_unknown
from tandem.proxy.api.responses_api.responses_chat import to_chat as response_to_chat
from tandem.proxy.api.responses_api.responses_request import (
    InputItem,
    ResponseRequest,
    options_of,
    skip_items_and_tools,
)
from tandem.proxy.api.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationFields,
    NotServed,
    TokenizeRequest,
    neutral_values,
)
from tandem.proxy.api.structured_output import custom_names, keep_served_tools, plan_output, skip_tools
from tandem.proxy.cluster.adapter_table import AdapterTable, NamedAdapter
from tandem.proxy.media.source import InvalidMedia
from tandem.proxy.parsers.reasoning import ReasoningFormat
from tandem.proxy.parsers.tool_formats import ToolFormat
from tandem.proxy.proxy_settings import AdmissionSettings
from tandem.proxy.text.model_text import EmbeddingDefaults, SamplingDefaults
from tandem.proxy.text.prompt import ChatPrompt, CompletionPrompt
from tandem.runtime.errors import InvalidRequest

COMPLETION_DEFAULT_MAX_TOKENS = 16
_NEUTRAL_VALUES = neutral_values(NotServed)

_SAME_NAMES = (
    "n", "seed", "stop_token_ids", "min_tokens", "bad_words", "priority", "request_id",
    "timeout", "return_tokens_as_token_ids", "include_stop_str_in_output", "truncate_prompt_tokens", "truncation_side",
    "cache_salt", "stream", "return_token_ids", "include_reasoning", "use_beam_search", "length_penalty",
)  # fmt: skip
"""Fields of a body that `GenerationRequest` has too. Null means their default."""

R = TypeVar(
    "R",
    CompletionRequest,
    ChatCompletionRequest,
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


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """What is known of the form of a model's prompts and answers, from its files and the operator's settings."""

    tools: ToolFormat = ToolFormat()  # noqa: RUF009  # frozen
    """How it writes tool calls."""
    reasoning: ReasoningFormat | None = None
    """How it writes its thinking; None if that is not known."""
    sampling: SamplingDefaults = SamplingDefaults()  # noqa: RUF009  # frozen
    embedding: EmbeddingDefaults = EmbeddingDefaults()  # noqa: RUF009  # frozen
    has_short_call_ids: bool = False
    """Whether its chat template demands ids of calls of nine letters and digits."""


class BodyDecoder:
    """Decodes and checks bodies. All methods raise InvalidRequest.

    max_media: limit on the images and videos of a chat; 0 if the model takes text only.
    """

    def __init__(
        self,
        served_model_name: str,
        settings: RequestSettings = RequestSettings(),  # noqa: B008  # frozen
        admission: AdmissionSettings = AdmissionSettings(),  # noqa: B008  # frozen
        formats: ModelFormats = ModelFormats(),  # frozen
        adapters: AdapterTable | None = None,
        max_media: int = 0,
    ) -> None:
        max_waiting, max_of_client = admission.max_waiting_requests, admission.max_requests_per_client
        self._max_sequences = min(max_waiting, max_of_client or max_waiting)
        self._max_inputs = min(max(max_waiting, MAX_INPUTS), max_of_client or MAX_INPUTS)
        self._settings = settings
        self._adapters = adapters or AdapterTable(None, [], served_model_name)
        self._embedding = msgspec.json.Decoder(EmbeddingRequest)
        self._served_model_name = served_model_name
        self._chats = ChatPromptBuilder(settings.trust_request_chat_template, max_media)
        self._formats = formats
        self._completion = msgspec.json.Decoder(CompletionRequest)
        self._chat = msgspec.json.Decoder(ChatCompletionRequest)
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
        checked = self._check(request, prompt, request.max_tokens, "max_tokens")
        return msgspec.structs.replace(checked, echo=bool(request.echo))

    def chat(self, body: bytes) -> GenerationRequest:
        request = self._decode_known(self._chat, body, skip_tools)
        keep_served_tools(request)
        return self._checked_chat(request)

    def message(self, body: bytes) -> GenerationRequest:
        request = self._decode_known(self._message, body, skip_blocks)
        checked = self._checked_chat(*to_chat(request, self._formats.reasoning is not None))
        if request.max_tokens == 0:
            return msgspec.structs.replace(checked, max_tokens=1, is_prompt_only=True, max_tokens_param="max_tokens")
        # An answer may end where the model's context does, so that clients need not know the length of their prompt.
        return msgspec.structs.replace(checked, default_max_tokens=request.max_tokens, max_tokens_param="max_tokens")

    def response(
        self,
        body: bytes,
        history: Callable[[str], list[InputItem]],
        find: Callable[[str], InputItem | None] = lambda _: None,
    ) -> GenerationRequest:
        """history: returns the items of a stored response and of those before it; may raise InvalidRequest. find:
        returns an item of a stored answer by its id."""
        request = self._decode_known(self._response, body, skip_items_and_tools)
        before = history(request.previous_response_id) if request.previous_response_id is not None else []
        if not isinstance(request.input, str):
            request.input = without_references(without_unknown(request.input), before, find)
        tools = ResponseTools(request, before)
        checked = self._checked_chat(*response_to_chat(request, before, tools))
        most = checked.default_max_tokens if request.max_output_tokens is None else request.max_output_tokens
        return msgspec.structs.replace(
            checked,
            response=options_of(request, tools.called),
            default_max_tokens=most,
            max_tokens_param="max_output_tokens",
        )

    def count(self, body: bytes) -> GenerationRequest:
        """Returns a request to count the tokens of a message's prompt."""
        request = self._decode_known(self._count_tokens, body, skip_blocks)
        return self._checked_chat(*to_chat(request, self._formats.reasoning is not None))

    def embedding(self, body: bytes) -> GenerationRequest:
        request = self._decode(self._embedding, body)
        defaults = self._formats.embedding
        defaults.check()
        prompt = CompletionPrompt(msgspec.Raw(bytes(request.input)), request.add_special_tokens is not False, "input")
        if prompt.num_prompts(self._max_inputs) > self._max_inputs:
            raise InvalidRequest(
                f"The request has more than {self._max_inputs} inputs, the limit; send fewer in one request.",
                "input",
            )
        check_truncation(request.truncate_prompt_tokens)
        if request.dimensions is not None:
            defaults.check_dimensions(request.dimensions)
        normalize = next(
            (each for each in (request.normalize, request.use_activation) if each is not None), defaults.normalize
        )
        options = EmbeddingOptions(defaults.pooling, normalize, request.dimensions, request.encoding_format == "base64")
        return GenerationRequest(
            prompt=prompt,
            max_tokens=1,
            max_tokens_param="input",
            base_sampling=SamplingParams(temperature=0.0),
            ignore_eos=True,
            is_prompt_only=True,
            adapter=self._adapter(request.model),
            embedding=options,
            **given_fields(request, ("priority", "request_id", "truncate_prompt_tokens", "cache_salt")),
        )

    def tokenize(self, body: bytes) -> tuple[str | ChatPrompt, bool, bool]:
        """Returns the prompt, whether the tokeniser adds its own tokens, and whether the answer has strings."""
        request = self._decode_known(self._tokenize, body, skip_tools)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("Send either prompt (a string) or messages (a list).", "prompt")
        if request.prompt is not None:
            return request.prompt, request.add_special_tokens is not False, bool(request.return_token_strs)
        keep_served_tools(request)
        prompt = self._chats.prompt(request, request.messages or [])
        if prompt.media:
            raise InvalidMedia(
                "/tokenize supports text only; the usage of a chat completion shows how many tokens its media have.",
                prompt.media[0].param,
            )
        return prompt, prompt.add_special_tokens, bool(request.return_token_strs)

    def detokenize(self, body: bytes) -> list[int]:
        """Returns the token ids."""
        return self._decode(self._detokenize, body).tokens

    def _decode(self, decoder: msgspec.json.Decoder[R], body: bytes) -> R:
        request = decode_body(decoder, body)
        if request.model not in (None, "", self._served_model_name) and self._adapter(request.model) is None:
            raise ModelNotFound(
                f"The model {request.model!r} does not exist; this server serves {self._served_model_name!r}.", "model"
            )
        return request

    def _decode_known(self, decoder: msgspec.json.Decoder[R], body: bytes, skip: Callable[[dict[str, Any]], bool]) -> R:
        """Decodes a body that may have parts of types that are skipped.

        skip: takes such parts out of the body, as JSON; returns whether there were any. Only bodies that were refused
        are decoded and encoded for it.
        """
        try:
            return self._decode(decoder, body)
        except InvalidRequest:
            try:
                document = msgspec.json.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                document = None
            if not isinstance(document, dict) or not skip(document):
                raise
        return self._decode(decoder, msgspec.json.encode(document))

    def _adapter(self, model: str | None) -> NamedAdapter | None:
        return self._adapters.get(model) if model and model != self._served_model_name else None

    def _checked_chat(self, request: ChatCompletionRequest, params: list[str] | None = None) -> GenerationRequest:
        prompt = self._chats.prompt(request, request.messages, params)
        param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        checked = self._check(request, prompt, getattr(request, param), param)
        prefix = prompt.last_text if request.echo else ""
        custom = custom_names(request)
        return msgspec.structs.replace(
            checked, is_chat=True, role=prompt.answer_role, prefix=prefix, custom_tools=custom
        )

    def _check_num_prompts(self, num_prompts: Callable[[int], int], n: int, param: str) -> None:
        """num_prompts: counts the prompts up to one more than its argument."""
        max_prompts = self._max_sequences // n
        if (number := num_prompts(max_prompts)) > max_prompts:
            raise InvalidRequest(
                f"The request asks for more than {self._max_sequences} sequences (prompts times n: at least {number} "
                f"times {n}), the limit; send fewer prompts in one request, or lower n.",
                param if max_prompts else "n",
            )

    def _check(
        self,
        request: GenerationFields,
        prompt: ChatPrompt | CompletionPrompt,
        max_tokens: int | None,
        max_tokens_param: str,
    ) -> GenerationRequest:
        is_chat, is_prompt_only = isinstance(request, ChatCompletionRequest), max_tokens == 0
        refuse_unsupported(request, _NEUTRAL_VALUES)
        check_logprobs(request, self._settings)
        if request.use_beam_search:
            check_beam_search(request, is_prompt_only)
        request = self._formats.sampling.fill(request)
        if is_prompt_only:
            max_tokens = 1
        min_tokens = request.min_tokens or 0
        if max_tokens is not None and min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {min_tokens}, but must be at most {max_tokens_param}, which is {max_tokens}.",
                "min_tokens",
            )
        check_truncation(request.truncate_prompt_tokens)
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        check_stop_strings(stop, "stop")
        if len(stop) > FEW_STOP_STRINGS:
            num_prompts = prompt.num_prompts(MAX_STOP_SEARCHES) if isinstance(prompt, CompletionPrompt) else 1
            check_stop_searches(len(stop), (request.n or 1) * num_prompts)
        options = request.stream_options
        if options is not None and not request.stream:
            raise InvalidRequest(
                "stream_options requires stream; set stream to true or leave it out.", "stream_options"
            )
        budget = None if request.thinking_token_budget == -1 else request.thinking_token_budget
        if budget is not None and self._formats.reasoning is None:
            raise InvalidRequest(
                f"thinking_token_budget is {budget}, but this server knows no thinking of its model; leave it out, or "
                "start the server with --reasoning-parser.",
                "thinking_token_budget",
            )
        reasoning = self._formats.reasoning if is_chat or budget is not None else None
        output = plan_output(request, self._formats.tools)
        if request.use_beam_search and output.param is not None:
            raise InvalidRequest(f"{output.param} is not supported with use_beam_search; leave one out.", output.param)
        if isinstance(prompt, ChatPrompt):
            prompt = msgspec.structs.replace(prompt, tools=output.tools)
        sampling = sampling_params(request)
        return GenerationRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            default_max_tokens=self._formats.sampling.max_new_tokens if is_chat else COMPLETION_DEFAULT_MAX_TOKENS,
            max_tokens_param=max_tokens_param,
            base_sampling=sampling,
            adapter=self._adapter(request.model),
            stop=stop,
            # A completed grammar allows no token but the end of the sequence.
            ignore_eos=bool(request.ignore_eos) and output.grammar is None,
            prompt_logprobs=None if request.stream else num_top(request.prompt_logprobs),
            num_prompt_logprobs=num_prompt_logprobs(request),
            is_prompt_only=is_prompt_only,
            output_grammar=output.grammar,
            grammar_param=output.param or "",
            tool_format=self._formats.tools.with_tools(output.arguments or {}) if output.may_call else None,
            has_short_call_ids=self._formats.has_short_call_ids,
            reasoning=reasoning,
            skip_special_tokens=request.skip_special_tokens is not False
            and not (output.may_call and self._formats.tools.has_special_markers)
            and not (reasoning is not None and reasoning.has_special_markers),
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None
            and bool(options.include_usage)
            and bool(options.continuous_usage_stats),
            thinking_token_budget=budget,
            **given_fields(request, _SAME_NAMES),
        )
