"""Request bodies as structs: OpenAI's fields and vLLM's extensions. Unknown fields are ignored, as OpenAI does.

`/openapi.json` and docs/api.md are generated from these types: ranges and descriptions exist only here. Fields that are
known but not supported are declared too, so that validation refuses them instead of ignoring them.

Messages come first, then structured output and tools, then the bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta, field

from tandem.protocol.messages.media import MediaKind

JsonObject = dict[str, Any]

MAX_CHAT_MESSAGES = 65_536
"""Messages of a chat, and, for the Responses API, items of the input."""
MAX_CHAT_PARTS = 65_536
"""Content parts and tool calls of all messages of a request."""

TEXT_FIELDS = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking",
}  # fmt: skip
"""Field with the content of a part, by the part's type. Some clients send parts of OpenAI's Responses API."""
MEDIA_FIELDS: dict[str, tuple[str, MediaKind]] = {
    "image_url": ("image_url", "image"), "input_image": ("image_url", "image"),
    "video_url": ("video_url", "video"), "input_video": ("video_url", "video"),
}  # fmt: skip
_PART_TYPES = [*TEXT_FIELDS, *MEDIA_FIELDS]
_PART_FIELDS = ("text", "refusal", "thinking", "image_url", "video_url")
"""Fields of a part that may hold its content."""


class MediaUrl(msgspec.Struct):
    """url: data, http, https, or file where the server allows it. detail: accepted and ignored."""

    url: str
    detail: str | None = None


class ThoughtText(msgspec.Struct):
    text: str = ""


class ContentPart(msgspec.Struct):
    """type: names the field that holds the content; if it is missing, that is the field that is given."""

    type: Annotated[str, Meta(extra_json_schema={"enum": _PART_TYPES})] | None = None
    text: str | None = None
    refusal: str | None = None
    thinking: Annotated[
        str | list[ThoughtText] | None,
        Meta(description="earlier thinking, which stands for `reasoning` in a message of the assistant"),
    ] = None
    image_url: Annotated[MediaUrl | str | None, Meta(description="a PNG, JPEG, WebP or GIF; docs/media.md")] = None
    video_url: Annotated[MediaUrl | str | None, Meta(description="an MP4 or WebM; docs/media.md")] = None

    @property
    def kind(self) -> str | None:
        """The type; without one it is the field that is given, or None."""
        if self.type is not None:
            return self.type
        return next((field for field in _PART_FIELDS if getattr(self, field) is not None), None)

    @property
    def is_blank(self) -> bool:
        """Whether it is a part of text whose content is null, as clients write empty ones. It is left out."""
        return self.type in TEXT_FIELDS and all(getattr(self, field) is None for field in _PART_FIELDS)


class FunctionCall(msgspec.Struct):
    name: str
    arguments: Annotated[
        Any,
        Meta(description="a JSON object, or a string that contains one; templates get anything else as text"),
    ] = None


class CustomCall(msgspec.Struct):
    """A call of a custom tool, which the model knows as a function with the argument `input`."""

    name: str
    input: str


_NO_CALL = FunctionCall("")


class ToolCall(msgspec.Struct):
    function: FunctionCall = field(default_factory=lambda: _NO_CALL)
    """Required unless the type is custom."""
    id: str | None = None
    type: str | None = "function"
    custom: CustomCall | None = None
    """Required if the type is custom."""

    def __post_init__(self) -> None:
        if self.custom is not None:
            self.function = FunctionCall(self.custom.name, {"input": self.custom.input})
        elif self.type == "custom" or self.function is _NO_CALL:
            raise ValueError(f"Object missing required field `{'custom' if self.type == 'custom' else 'function'}`")


class ChatMessage(msgspec.Struct):
    """role: developer, system, user, assistant, tool, or another role that the chat template supports."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: Annotated[
        str | Sequence[ContentPart | str] | None,
        Meta(description="text or content parts; null is refused for the roles system, developer and user"),
    ] = None
    refusal: Annotated[str | None, Meta(description="stands for a content of null")] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Meta(description="earlier calls of the assistant")] = None
    function_call: Annotated[FunctionCall | None, Meta(description="older form of tool_calls, for one call")] = None
    tool_call_id: Annotated[str | None, Meta(description="in a tool message: the call that it answers")] = None
    reasoning: Annotated[str | None, Meta(description="earlier thinking, for templates that render it")] = None
    reasoning_content: Annotated[str | None, Meta(description="older name of reasoning")] = None


MAX_FUNCTIONS = 1024
"""Functions of a request, those in namespaces included."""
SERVED_TOOLS = ("function", "custom")
"""Types of tools; those of other types are skipped."""
CUSTOM_INPUT = "input"
"""The one argument of the function that the model gets for a custom tool."""

FunctionName = Annotated[str, Meta(pattern=r"^[\w.-]{1,128}$(?!\n)")]
"""Letters of any script: all families' formats can write them."""
Parameters = JsonObject | str | bool | list[Any] | None
"""JSON schema of a tool's arguments, in any form that clients send: see `FunctionDefinition.schema`."""

GrammarText = Annotated[str, Meta(min_length=1, max_length=131072)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1, max_length=65536)]], Meta(min_length=1, max_length=10000)]


class JsonSchemaFormat(msgspec.Struct):
    """strict: true refuses schema keywords that cannot be enforced; otherwise they are ignored, which is logged."""

    name: str = ""
    description: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """json_schema: required if the type is json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's field; exactly one member is set. grammar: Lark or GBNF."""

    json: str | JsonObject | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


class FunctionDefinition(msgspec.Struct):
    """parameters: JSON schema of the arguments, perhaps in a string. strict: true refuses keywords that cannot be
    enforced."""

    name: FunctionName
    description: str | None = None
    parameters: Parameters = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        given = self.parameters
        if isinstance(given, str):
            try:
                given = msgspec.json.decode(given) if given.strip() else None
            except (msgspec.DecodeError, RecursionError):
                return
        if given is True:
            given = {"type": "object"}
        self.parameters = given or None  # PHP writes an empty object as []

    @property
    def schema(self) -> JsonObject | None:
        """The schema for the chat template and for parsers. What is no schema allows any object."""
        given = self.parameters
        return given if given is None or isinstance(given, dict) else {"type": "object"}


class InputGrammar(msgspec.Struct):
    definition: str
    syntax: str = "lark"


class InputFormat(msgspec.Struct, omit_defaults=True):
    """Format of a custom tool's input. The model is told a grammar, which is not enforced."""

    type: str = field(default_factory=lambda: "text")  # always shown
    definition: str | None = None
    """Of a grammar, in the Responses API."""
    syntax: str | None = None
    grammar: InputGrammar | None = None
    """The same in chat completions."""

    @property
    def given_grammar(self) -> InputGrammar | None:
        if self.definition is not None:
            return InputGrammar(self.definition, self.syntax or "lark")
        return self.grammar


class CustomTool(msgspec.Struct):
    """A tool whose input is any text. The model gets it as a function with one string as its argument."""

    name: FunctionName
    description: str | None = None
    format: InputFormat | None = None

    def function(self) -> FunctionDefinition:
        grammar = None if self.format is None else self.format.given_grammar
        said = "The tool's input, as plain text."
        if grammar is not None:
            said = f"The tool's input, as plain text that follows this {grammar.syntax} grammar:\n{grammar.definition}"
        schema = {
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string", "description": said}},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
        return FunctionDefinition(self.name, self.description, schema)


_NO_DEFINITION = FunctionDefinition("")


class Tool(msgspec.Struct):
    """A function, or a custom tool. Tools of other types, which OpenAI's servers run, are skipped."""

    function: FunctionDefinition = field(default_factory=lambda: _NO_DEFINITION)
    """Required if the type is function."""
    type: str = "function"
    custom: CustomTool | None = None
    """Required if the type is custom."""

    def __post_init__(self) -> None:
        if self.type == "custom":
            if self.custom is None:
                raise ValueError("Object missing required field `custom`")
            self.function = self.custom.function()
        elif self.type == "function" and self.function is _NO_DEFINITION:
            raise ValueError("Object missing required field `function`")

    @property
    def is_served(self) -> bool:
        return self.type in SERVED_TOOLS


class NamedFunction(msgspec.Struct):
    name: str


_NO_FUNCTION = NamedFunction("")


class NamedTool(msgspec.Struct):
    """A function or a custom tool. Tools of other types are never called."""

    function: NamedFunction = field(default_factory=lambda: _NO_FUNCTION)
    """Required if the type is function."""
    type: str = "function"
    custom: NamedFunction | None = None
    """Required if the type is custom."""

    def __post_init__(self) -> None:
        if self.type == "custom":
            if self.custom is None:
                raise ValueError("Object missing required field `custom`")
            self.function = self.custom
        elif self.type == "function" and self.function is _NO_FUNCTION:
            raise ValueError("Object missing required field `function`")

    @property
    def is_served(self) -> bool:
        return self.type in SERVED_TOOLS


class AllowedTools(msgspec.Struct):
    """tools: those of the request's tools that the answer may call; the chat template shows no others. mode: whether
    the answer must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_FUNCTIONS)]


class NamedToolChoice(msgspec.Struct):
    """Tools that the answer must or may call. A choice of another type names a tool that OpenAI's servers run, and
    counts as auto."""

    function: NamedFunction | None = None
    """Required if the type is function."""
    type: str = "function"
    allowed_tools: AllowedTools | None = None
    """Required if the type is allowed_tools."""
    custom: NamedFunction | None = None
    """Required if the type is custom."""

    def __post_init__(self) -> None:
        if self.type == "custom":
            if self.custom is None:
                raise ValueError("Object missing required field `custom`")
            self.type, self.function = "function", self.custom

    @property
    def is_served(self) -> bool:
        return self.type in ("function", "allowed_tools")


def doc(description: str) -> Meta:
    return Meta(description=description)


REQUEST_ID_PATTERN = r"^[!-~]{1,128}$"
"""Visible ASCII characters."""
SOONEST_PRIORITY = -100

OptionalBool = bool | None
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
MaxTokens = Annotated[int, Meta(ge=1, lt=2**31)]
MaxTokensOrZero = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=1, le=128)]
NumTop = Annotated[int, Meta(ge=-1, lt=2**31)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
ThinkingBudget = Annotated[int, Meta(ge=-1, lt=2**31)]
TopP = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, lt=2**31)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(gt=0, le=1e6)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
DecimalId = Annotated[str, Meta(pattern=r"^[0-9]{1,9}$")]
LogitBias = Annotated[dict[DecimalId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)]
LogprobTokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=128)]
LengthPenalty = Annotated[float, Meta(ge=-100, le=100)]
AllowedTokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=65536)]
BadWords = Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=128)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
MAX_STOP_CHARACTERS = 16 * 1024
"""Characters of all stop strings of a request."""
StopStrings = Annotated[list[StopString], Meta(max_length=256)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=1024)]
Truncation = Annotated[int, Meta(ge=-1, lt=2**31, extra_json_schema={"not": {"const": 0}})]
Priority = Annotated[int, Meta(ge=SOONEST_PRIORITY, le=100)]
Seconds = Annotated[float, Meta(gt=0)]
RequestId = Annotated[str, Meta(pattern=REQUEST_ID_PATTERN)]
CacheSalt = Annotated[str, Meta(max_length=1024)]
Template = Annotated[str, Meta(min_length=1, max_length=65536)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]

_ONE_PROMPT = {"type": "string", "minLength": 1}
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
_PROMPT_SCHEMA: JsonObject = {
    "anyOf": [
        _ONE_PROMPT,
        {"type": "array", "minItems": 1, "items": _ONE_PROMPT},
        _TOKEN_IDS,
        {"type": "array", "minItems": 1, "items": _TOKEN_IDS},
    ]
}
Prompts = Annotated[
    msgspec.Raw,
    Meta(
        description="a string, a list of strings, a list of token ids or a list of lists of token ids",
        extra_json_schema=_PROMPT_SCHEMA,
    ),
]


class StreamOptions(msgspec.Struct):
    include_usage: Annotated[OptionalBool, doc("one more chunk at the end, with the usage")] = False
    continuous_usage_stats: Annotated[OptionalBool, doc("the usage so far in every chunk")] = False


def accepts(*neutral: Any) -> Meta:
    """neutral: accepted values of a field that is not supported, besides null: they request nothing."""
    description = "not supported: other values are refused"
    return Meta(description=description, extra_json_schema={"enum": [None, *neutral]})


def neutral_values(kind: type[msgspec.Struct]) -> dict[str, list[Any]]:
    """Returns what `accepts` lists, by the name of the field."""
    hints = get_type_hints(kind, include_extras=True).items()
    return {
        name: hint.__metadata__[0].extra_json_schema["enum"]
        for name, hint in hints
        if getattr(hint, "__origin__", None) is Any
    }


class NotServed(msgspec.Struct):
    """Fields that are not supported. Only null and their neutral values are accepted."""

    suffix: Annotated[Any, accepts("")] = None
    functions: Annotated[Any, accepts([])] = None
    function_call: Annotated[Any, accepts("none", "auto")] = None
    modalities: Annotated[Any, accepts(["text"])] = None
    audio: Annotated[Any, accepts()] = None
    web_search_options: Annotated[Any, accepts()] = None
    prompt_embeds: Annotated[Any, accepts()] = None
    logits_processors: Annotated[Any, accepts([])] = None
    mm_processor_kwargs: Annotated[Any, accepts({})] = None
    kv_transfer_params: Annotated[Any, accepts({})] = None
    vllm_xargs: Annotated[Any, accepts({})] = None
    repetition_detection: Annotated[Any, accepts()] = None
    watermarking: Annotated[Any, accepts(False)] = None
    media_io_kwargs: Annotated[Any, accepts({})] = None
    return_prompt_text: Annotated[Any, accepts(False)] = None


class GenerationFields(NotServed):
    """Fields of both completions and chats. Null means the default.

    The types check each field by itself; `validation` checks combinations of fields.
    """

    model: Annotated[str | None, doc("a name from /v1/models; null and empty select the served model")] = None
    temperature: Annotated[Temperature | None, doc("0 is greedy decoding; null: the model's default, else 1")] = None
    top_p: Annotated[TopP | None, doc("samples from the most likely tokens with this total probability")] = None
    top_k: Annotated[TopK | None, doc("samples from this many most likely tokens; 0 or -1: all")] = None
    min_p: Annotated[MinP | None, doc("minimum probability, relative to the most likely token")] = None
    repetition_penalty: Annotated[
        Factor | None, doc("for tokens of the prompt and output; above 1 makes them less likely")
    ] = None
    presence_penalty: Annotated[Penalty | None, doc("subtracted from the logit of tokens in the output")] = 0.0
    frequency_penalty: Annotated[Penalty | None, doc("the same, times the number of occurrences")] = 0.0
    logit_bias: Annotated[LogitBias | None, doc("token id to a value that is added to its logit")] = None
    allowed_token_ids: Annotated[AllowedTokenIds | None, doc("only these tokens are generated")] = None
    bad_words: Annotated[BadWords | None, doc("strings whose token sequences are not generated")] = None
    response_format: Annotated[
        ResponseFormat | None, doc("JSON output, optionally with a schema; docs/structured_output.md")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, doc("output that follows a JSON schema, regex, grammar or list of choices")
    ] = None
    thinking_token_budget: Annotated[
        ThinkingBudget | None, doc("tokens of thinking after which the answer must begin; -1: no limit")
    ] = None
    seed: Annotated[Seed | None, doc("makes sampling reproducible; choice i uses seed + i")] = None
    n: Annotated[Count | None, doc("number of choices per prompt; the prompt is computed once")] = 1
    stop: Annotated[
        StopString | StopStrings | None,
        doc(f"strings that end the text, of at most {MAX_STOP_CHARACTERS} characters together; not part of it"),
    ] = None
    stop_token_ids: Annotated[StopTokenIds | None, doc("tokens that end the text")] = None
    include_stop_str_in_output: Annotated[OptionalBool, doc("the text includes the stop string")] = False
    ignore_eos: Annotated[OptionalBool, doc("continue after end-of-sequence tokens")] = False
    min_tokens: Annotated[
        MaxTokensOrZero | None,
        doc(
            "stop tokens are not generated before this many tokens, and stop strings that are complete within them do "
            "not end the text; at most max_tokens"
        ),
    ] = 0
    prompt_logprobs: Annotated[
        NumTop | None, doc("number of most likely tokens to return per prompt token; -1: all; not for streams")
    ] = None
    logprob_token_ids: Annotated[
        LogprobTokenIds | None,
        doc("returns the logprobs of the token itself and of these, not of the most likely; requires logprobs"),
    ] = None
    use_beam_search: Annotated[
        OptionalBool, doc("returns the n most likely sequences of a beam search of width n; not for streams")
    ] = False
    length_penalty: Annotated[
        LengthPenalty | None, doc("exponent of the length by which a beam's log-probability is divided")
    ] = 1.0
    stream: Annotated[OptionalBool, doc("server-sent events, one chunk per piece of text")] = False
    stream_options: Annotated[StreamOptions | None, doc("only together with stream")] = None
    return_token_ids: Annotated[OptionalBool, doc("returns token_ids and prompt_token_ids")] = False
    return_tokens_as_token_ids: Annotated[OptionalBool, doc("logprobs show tokens as token_id:NUMBER")] = False
    skip_special_tokens: Annotated[OptionalBool, doc("leaves special tokens out of the text")] = True
    truncate_prompt_tokens: Annotated[
        Truncation | None, doc("keeps this many tokens of the prompt; -1: as many as fit beside max_tokens")
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None,
        doc("left removes tokens at the beginning of the prompt, right at its end; by default left"),
    ] = None
    priority: Annotated[Priority | None, doc("lower values are served first")] = 0
    timeout: Annotated[
        Seconds | None, doc("seconds until the last token; X-Request-Timeout and --request-timeout-s may be shorter")
    ] = None
    request_id: Annotated[RequestId | None, doc("the answer's id ends with it; X-Request-Id overrides it")] = None
    cache_salt: Annotated[CacheSalt | None, doc("requests with different salts share no cached prefix")] = None


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: Prompts
    max_tokens: Annotated[
        MaxTokensOrZero | None, doc("by default 16, or fewer if fewer fit; 0 only together with echo")
    ] = None
    best_of: Annotated[Count | None, doc("accepted if equal to n; all choices are returned")] = None
    logprobs: Annotated[NumTop | bool | None, doc("number of most likely tokens to return per token; -1: all")] = None
    echo: Annotated[OptionalBool, doc("the text and logprobs begin with the prompt")] = False
    add_special_tokens: Annotated[OptionalBool, doc("the tokeniser adds its own tokens, such as a BOS token")] = True


Messages = Annotated[
    Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_CHAT_MESSAGES)],
    doc("the chat, for the model's chat template"),
]
Tools = Annotated[
    Annotated[list[Tool], Meta(max_length=MAX_FUNCTIONS)] | None,
    doc("functions and custom tools that the model may call"),
]
AddGenerationPrompt = Annotated[
    OptionalBool, doc("the prompt ends with the beginning of an answer; by default true without continue_final_message")
]
ContinueFinalMessage = Annotated[
    OptionalBool, doc("the answer continues the last message; not together with add_generation_prompt")
]
ChatTemplate = Annotated[
    Template | None, doc("jinja template in place of the model's; requires --trust-request-chat-template")
]
ChatTemplateKwargs = Annotated[JsonObject | None, doc("variables for the template")]
Documents = Annotated[list[JsonObject] | None, doc("template variable of this name, for RAG templates")]
ReasoningEffort = Annotated[
    str | None,
    doc(
        "none switches thinking off, other values switch it on, unless chat_template_kwargs do; also a variable of the "
        "template"
    ),
]


class ChatCompletionRequest(GenerationFields, kw_only=True):
    messages: Messages
    max_completion_tokens: Annotated[MaxTokens | None, doc("by default as many as fit")] = None
    max_tokens: Annotated[MaxTokens | None, doc("older name of max_completion_tokens")] = None
    logprobs: Annotated[bool | Literal["true", "false"] | None, doc("returns the logprob of each token")] = False
    tools: Tools = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedToolChoice | None,
        doc("whether the answer may or must call tools, or which one; by default auto"),
    ] = None
    parallel_tool_calls: Annotated[OptionalBool, doc("an answer may contain more than one call")] = True
    top_logprobs: Annotated[
        NumTop | None, doc("most likely tokens to return per token; -1: all; requires logprobs")
    ] = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = False
    chat_template: ChatTemplate = None
    chat_template_kwargs: ChatTemplateKwargs = None
    documents: Documents = None
    reasoning_effort: ReasoningEffort = None
    include_reasoning: Annotated[OptionalBool, doc("the answer has the model's thinking in `reasoning`")] = True
    echo: Annotated[OptionalBool, doc("the answer begins with the last message if that has the answer's role")] = False
    add_special_tokens: Annotated[OptionalBool, doc("the tokeniser adds its own tokens to those of the template")] = (
        False
    )


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """OpenAI's `/v1/embeddings`, with vLLM's extensions."""

    input: Prompts
    model: Annotated[str | None, doc("a name from /v1/models; null and empty select the served model")] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, doc("base64: of little-endian float32 values; by default float")
    ] = "float"
    dimensions: Annotated[
        Annotated[int, Meta(ge=1, lt=2**31)] | None,
        doc("values of an embedding: all, or fewer if the model's config says that they may be shortened (Matryoshka)"),
    ] = None
    normalize: Annotated[
        OptionalBool, doc("scales each embedding to length 1; by default as the model's files say, else true")
    ] = None
    use_activation: Annotated[OptionalBool, doc("vLLM's newer name of normalize")] = None
    add_special_tokens: Annotated[OptionalBool, doc("the tokeniser adds its own tokens, such as a BOS token")] = True
    truncate_prompt_tokens: Annotated[
        Truncation | None, doc("keeps this many tokens at the end of each input; -1: as many as fit")
    ] = None
    priority: Annotated[Priority | None, doc("lower values are served first")] = 0
    request_id: Annotated[RequestId | None, doc("the answer's id ends with it; X-Request-Id overrides it")] = None
    cache_salt: Annotated[CacheSalt | None, doc("requests with different salts share no cached prefix")] = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """vLLM's `/tokenize`: of a prompt, or of a chat, whose prompt tokens are those that a completion would have."""

    prompt: Annotated[str | None, doc("a text; either this or messages")] = None
    messages: Messages | None = None
    model: str | None = None
    tools: Tools = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = False
    chat_template: ChatTemplate = None
    chat_template_kwargs: ChatTemplateKwargs = None
    documents: Documents = None
    reasoning_effort: ReasoningEffort = None
    add_special_tokens: Annotated[
        OptionalBool, doc("the tokeniser adds its own tokens; by default true for a prompt, false for a chat")
    ] = None
    return_token_strs: Annotated[OptionalBool, doc("adds token_strs to the answer")] = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(max_length=2**20)]
    model: str | None = None
