"""Bodies of answers as structs: OpenAI's fields and vLLM's extensions. `/openapi.json` is generated from them."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from tandem.protocol.messages.media import MediaKind
from tandem.protocol.messages.sampling import FinishReason


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """cached_tokens: prompt tokens that the prefill worker found in its prefix cache. multimodal_tokens: placeholder
    tokens by kind of media (`image`, `video`), as in vLLM; null without media."""

    cached_tokens: int
    multimodal_tokens: dict[MediaKind, int] | None = None


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """The chunks of a stream before the last have no details."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of each token; null for the first token of an echoed prompt. text_offset: in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    """vLLM's form. rank: 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token, by token id as a string: the prompt's own token and the most likely ones. None for the first."""


class CompletionChoice(msgspec.Struct, frozen=True):
    """A complete choice, or a piece of one in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """See `TextDelta`."""
    token_ids: list[int] | None = None
    """Set if the request has return_token_ids."""
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    """Unset in streams."""
    prompt_token_ids: list[int] | None = None
    """Set if the request has return_token_ids, in the first piece only."""


class CompletionResponse(msgspec.Struct, frozen=True):
    """usage: unset in streams without stream_options.include_usage. service_tier, system_fingerprint: unset in streams;
    OpenAI's clients read them."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: UnsetType | None = UNSET
    system_fingerprint: UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


ChatFinishReason = FinishReason | Literal["tool_calls"]


class CalledFunction(msgspec.Struct, frozen=True):
    """arguments: JSON in a string. A stream's first chunk of a call has the name, and each chunk adds arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class CalledCustomTool(msgspec.Struct, frozen=True):
    """A stream's first chunk of a call has the name, and each chunk adds input."""

    input: str
    name: str | UnsetType = UNSET


class AnsweredToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call, or what a chunk adds to it. The type says whether it has a function or a custom tool."""

    index: int | UnsetType = UNSET
    """In streams only."""
    id: str | UnsetType = UNSET
    """In complete answers and in a call's first chunk, as the type."""
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustomTool | UnsetType = UNSET


class AssistantMessage(msgspec.Struct, frozen=True):
    """content: None if the answer consists of tool calls or thinking. reasoning: the thinking, without its markers.

    role: assistant, or that of a message which it continues.

    Fields that are always null are part of OpenAI's answers.
    """

    content: str | None
    role: str = "assistant"
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[AnsweredToolCall] | None = None
    reasoning: str | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AssistantMessage
    finish_reason: ChatFinishReason | None
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    service_tier: None = None
    system_fingerprint: None = None
    object: Literal["chat.completion"] = "chat.completion"


class ChatDelta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[AnsweredToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """token_ids: unset in the chunks before the first token. stop_reason: in the last chunk of a choice."""

    index: int
    delta: ChatDelta
    finish_reason: ChatFinishReason | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType | None = UNSET
    stop_reason: int | str | UnsetType | None = UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True):
    """prompt_token_ids: only in the chunks that come before the first token."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Embedding(msgspec.Struct, frozen=True):
    """embedding: a list of numbers, or base64 of little-endian float32 values."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingResponse(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class ModelCard(msgspec.Struct, frozen=True):
    """max_model_len: vLLM's field; None while no worker is ready. root, parent: of a LoRA adapter, its name and the
    served model; of the served model, its name and null. No paths: clients need not know the server's folders."""

    id: str
    created: int
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: Literal["tandem"] = "tandem"
    root: str = ""
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorDetail


class VersionResponse(msgspec.Struct, frozen=True):
    version: str


class HealthResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    status: Literal["ok", "unavailable"]
    reason: str | None = None


class TokenizeResponse(msgspec.Struct, frozen=True):
    """max_model_len: None while no worker is ready. token_strs: as the vocabulary writes them."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str
