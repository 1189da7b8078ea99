"""The bodies of requests as structs: OpenAI's, with vLLM's extensions. Unknown fields are ignored, as OpenAI does.

The types are what `/openapi.json` and docs/api.md say: ranges and descriptions stand here alone. Fields that are known
but not served are declared too, so that validation refuses what they ask for in place of dropping it in silence.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

REQUEST_ID_PATTERN = r"^[!-~]{1,128}$"
"""Visible ASCII."""
OptionalBool = bool | None
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
DecimalTokenId = Annotated[str, Meta(pattern=r"^[0-9]{1,9}$")]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
NumTop = Annotated[int, Meta(ge=0, le=20)]
MaxTokens = Annotated[int, Meta(ge=1, lt=2**31)]
JsonObject = dict[str, Any]

_PROMPT_SCHEMA: JsonObject = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "array",
                "minItems": 1,
                "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
            },
        },
    ]
}

SOONEST_PRIORITY = -100


class StreamOptions(msgspec.Struct):
    include_usage: Annotated[OptionalBool, Meta(description="one more chunk at the end, with the usage")] = False
    continuous_usage_stats: Annotated[OptionalBool, Meta(description="the usage so far in every chunk")] = False


GrammarText = Annotated[str, Meta(min_length=1, max_length=131072)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1, max_length=65536)]], Meta(min_length=1, max_length=10000)]


class JsonSchemaFormat(msgspec.Struct):
    """strict: keywords of the schema that cannot be held to are refused; false passes them over."""

    name: str = ""
    description: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """json_schema: with the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """As vLLM's, exactly one of them. grammar: Lark or GBNF."""

    json: str | JsonObject | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


class FunctionDefinition(msgspec.Struct):
    """parameters: the JSON schema of the arguments. strict: as that of a response_format."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct):
    name: str


class NamedToolChoice(msgspec.Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


Tools = Annotated[
    Annotated[list[Tool], Meta(max_length=128)] | None, Meta(description="functions that the model may call")
]


class NotServed(msgspec.Struct):
    """Neutral values are accepted (`validation.NEUTRAL_VALUES`); the base of both requests."""

    suffix: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    prompt_embeds: Any = None
    logits_processors: Any = None
    mm_processor_kwargs: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    store: Any = None
    service_tier: Any = None
    verbosity: Any = None
    truncation_side: Any = None
    logprob_token_ids: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    watermarking: Any = None
    media_io_kwargs: Any = None
    return_prompt_text: Any = None


class GenerationFields(NotServed):
    """What both kinds of request share. A null is the default. What one field must be beside another is checked in
    `validation`; what it must be alone is said here, in the type, and so in `/openapi.json` too.
    """

    model: Annotated[str | None, Meta(description="the name that /v1/models tells; null takes the one there is")] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None,
        Meta(description="0 always takes the most likely token; null takes the model's default, else 1"),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="the fewest tokens whose probabilities reach this sum"),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, lt=2**31)] | None, Meta(description="so many most likely tokens; 0 or -1: all")
    ] = None
    min_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="tokens at least so likely, relative to the most likely one"),
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        Meta(description="of tokens in prompt and output; more than 1 makes them less likely"),
    ] = None
    presence_penalty: Annotated[
        Annotated[float, Meta(ge=-2, le=2)] | None, Meta(description="of tokens that are in the output")
    ] = 0.0
    frequency_penalty: Annotated[
        Annotated[float, Meta(ge=-2, le=2)] | None, Meta(description="the same, times how often they are")
    ] = 0.0
    logit_bias: Annotated[
        Annotated[dict[DecimalTokenId, Bias], Meta(max_length=1024)] | None,
        Meta(description="token id to what is added to its logit"),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], Meta(min_length=1, max_length=65536)] | None,
        Meta(description="no other token is chosen"),
    ] = None
    bad_words: Annotated[
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=128)] | None,
        Meta(description="strings whose tokens are not generated one after the other"),
    ] = None
    response_format: Annotated[
        ResponseFormat | None, Meta(description="the text is JSON, of this schema; docs/structured_output.md")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Meta(description="the text follows this schema, regex, grammar or is one of these")
    ] = None
    guided_json: Annotated[str | JsonObject | None, Meta(description="structured_outputs.json by its older name")] = (
        None
    )
    guided_regex: Annotated[GrammarText | None, Meta(description="structured_outputs.regex by its older name")] = None
    guided_choice: Annotated[Choices | None, Meta(description="structured_outputs.choice by its older name")] = None
    guided_grammar: Annotated[GrammarText | None, Meta(description="structured_outputs.grammar by its older name")] = (
        None
    )
    seed: Annotated[
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None,
        Meta(description="the same request with the same seed gives the same answer; choice i takes seed + i"),
    ] = None
    n: Annotated[
        Annotated[int, Meta(ge=1, le=128)] | None, Meta(description="choices for each prompt, which is computed once")
    ] = 1
    stop: Annotated[
        StopString | Annotated[list[StopString], Meta(max_length=16)] | None,
        Meta(description="strings that end the text, which does not include them"),
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=1024)] | None, Meta(description="tokens that end the text")
    ] = None
    include_stop_str_in_output: Annotated[OptionalBool, Meta(description="the text ends with the stop string")] = False
    ignore_eos: Annotated[OptionalBool, Meta(description="go on after the model's end-of-sequence tokens")] = False
    min_tokens: Annotated[
        Annotated[int, Meta(ge=0, lt=2**31)] | None,
        Meta(description="stop tokens are impossible until so many tokens are generated; at most max_tokens"),
    ] = 0
    prompt_logprobs: Annotated[
        NumTop | None, Meta(description="so many most likely tokens for each of the prompt's; not in streams")
    ] = None
    stream: Annotated[OptionalBool, Meta(description="server-sent events, a chunk for each piece of text")] = False
    stream_options: Annotated[StreamOptions | None, Meta(description="only together with stream")] = None
    return_token_ids: Annotated[OptionalBool, Meta(description="token_ids in every choice")] = False
    return_tokens_as_token_ids: Annotated[
        OptionalBool, Meta(description="tokens in logprobs are told as token_id:NUMBER")
    ] = False
    skip_special_tokens: Annotated[OptionalBool, Meta(description="special tokens are not in the text")] = True
    spaces_between_special_tokens: Annotated[
        OptionalBool, Meta(description="accepted; these tokenisers write no spaces of their own")
    ] = True
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, lt=2**31, extra_json_schema={"not": {"const": 0}})] | None,
        Meta(description="a longer prompt loses its beginning; -1: as many as fit beside max_tokens"),
    ] = None
    priority: Annotated[
        Annotated[int, Meta(ge=SOONEST_PRIORITY, le=100)] | None, Meta(description="a lower one is served first")
    ] = 0
    timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="seconds until the last token, or the request ends with deadline_exceeded; the header "
            "X-Request-Timeout and the server's --request-timeout-s may say less"
        ),
    ] = None
    request_id: Annotated[
        Annotated[str, Meta(pattern=REQUEST_ID_PATTERN)] | None,
        Meta(description="the answer's id ends with it; the header X-Request-Id comes first"),
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(max_length=1024)] | None,
        Meta(description="requests with different salts share no cached prefix"),
    ] = None
    user: Annotated[str | None, Meta(description="accepted; nothing is done with it")] = None


AddSpecialTokens = Annotated[
    OptionalBool, Meta(description="the tokeniser adds its own, such as one that begins the sequence")
]
ReturnTokenStrs = Annotated[OptionalBool, Meta(description="token_strs in the answer")]


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: Annotated[
        msgspec.Raw,
        Meta(
            description="a string, a list of strings, a list of token ids or a list of those",
            extra_json_schema=_PROMPT_SCHEMA,
        ),
    ]
    max_tokens: Annotated[
        Annotated[int, Meta(ge=0, lt=2**31)] | None,
        Meta(description="to generate at most; by default 16, or less where less fits. 0 only with echo"),
    ] = None
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=128)] | None, Meta(description="accepted if it equals n; all choices are told")
    ] = None
    logprobs: Annotated[NumTop | bool | None, Meta(description="so many most likely tokens beside each chosen one")] = (
        None
    )
    echo: Annotated[OptionalBool, Meta(description="the text begins with the prompt, its logprobs too")] = False
    add_special_tokens: AddSpecialTokens = True


class MediaUrl(msgspec.Struct):
    """url: data, http, https, or file where the server allows it. detail: accepted; the model sees all there is."""

    url: str
    detail: str | None = None


class ContentPart(msgspec.Struct):
    """type: text (with text), refusal (with refusal), and for models that take them image_url and video_url."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "refusal", "image_url", "video_url"]})]
    text: str | None = None
    refusal: str | None = None
    image_url: Annotated[MediaUrl | str | None, Meta(description="a PNG, JPEG, WebP or GIF; docs/media.md")] = None
    video_url: Annotated[MediaUrl | str | None, Meta(description="an MP4 or WebM")] = None


class FunctionCall(msgspec.Struct):
    """arguments: JSON in a string, as the model wrote it."""

    name: str
    arguments: str | JsonObject | None = None


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: str | None = "function"


class ChatMessage(msgspec.Struct):
    """role: developer, system, user, assistant, tool, or another that the chat template knows."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: Annotated[
        str | list[ContentPart] | None, Meta(description="text, or parts of it; null only beside tool_calls")
    ] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Meta(description="what an assistant has called before")] = None
    tool_call_id: Annotated[str | None, Meta(description="of a tool: which call this answers")] = None
    reasoning_content: Annotated[str | None, Meta(description="for templates that show earlier reasoning")] = None


Messages = Annotated[
    Annotated[list[ChatMessage], Meta(min_length=1, max_length=65536)],
    Meta(description="the chat so far, as the model's template takes it"),
]
AddGenerationPrompt = Annotated[
    OptionalBool,
    Meta(description="the prompt ends with the beginning of an answer; by default it does, without the next field"),
]
ContinueFinalMessage = Annotated[
    OptionalBool, Meta(description="the answer goes on with the last message; not with add_generation_prompt")
]
ChatTemplate = Annotated[
    Annotated[str, Meta(min_length=1, max_length=65536)] | None,
    Meta(description="jinja, in place of the model's; only with --trust-request-chat-template"),
]
ChatTemplateKwargs = Annotated[JsonObject | None, Meta(description="variables that the template sees")]
Documents = Annotated[list[JsonObject] | None, Meta(description="variable of that name, for RAG templates")]
ReasoningEffort = Annotated[str | None, Meta(description="variable of that name, for templates that know it")]
AddSpecialTokensToChat = Annotated[
    OptionalBool, Meta(description="the tokeniser adds its own tokens to those that the template writes")
]


class ChatCompletionRequest(GenerationFields, kw_only=True):
    messages: Messages
    max_completion_tokens: Annotated[
        MaxTokens | None, Meta(description="to generate at most; by default as many as fit")
    ] = None
    max_tokens: Annotated[MaxTokens | None, Meta(description="the same by its older name")] = None
    logprobs: Annotated[OptionalBool, Meta(description="of each token")] = False
    tools: Tools = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedToolChoice | None,
        Meta(description="whether the answer may or must call tools, or which one; by default it may"),
    ] = None
    parallel_tool_calls: Annotated[OptionalBool, Meta(description="an answer may call more than one")] = True
    top_logprobs: Annotated[NumTop | None, Meta(description="and so many most likely ones; only with logprobs")] = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = False
    chat_template: ChatTemplate = None
    chat_template_kwargs: ChatTemplateKwargs = None
    documents: Documents = None
    reasoning_effort: ReasoningEffort = None
    echo: Annotated[OptionalBool, Meta(description="not served: true is refused")] = False
    add_special_tokens: AddSpecialTokensToChat = False


class TokenizeTextRequest(msgspec.Struct, kw_only=True):
    """As vLLM's."""

    prompt: str
    model: str | None = None
    add_special_tokens: AddSpecialTokens = True
    return_token_strs: ReturnTokenStrs = False


class TokenizeChatRequest(msgspec.Struct, kw_only=True):
    """As vLLM's: the tokens of the prompt that a chat completion would have."""

    messages: Messages
    model: str | None = None
    tools: Tools = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = False
    chat_template: ChatTemplate = None
    chat_template_kwargs: ChatTemplateKwargs = None
    documents: Documents = None
    reasoning_effort: ReasoningEffort = None
    add_special_tokens: AddSpecialTokensToChat = False
    return_token_strs: ReturnTokenStrs = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None
