"""Answers and events of OpenAI's Responses API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tandem.proxy.api.responses_request import InputItem

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str = ""


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    content: list[OutputText] = []
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """summary: empty, because the content is the thinking itself."""

    id: str
    content: list[ReasoningText] = []
    status: ItemStatus = "in_progress"
    summary: list[Any] = []
    encrypted_content: None = None


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """arguments: JSON in a string. namespace: of the function, if it has one."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: ItemStatus = "in_progress"
    namespace: str | None = None


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(msgspec.Struct, frozen=True):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the request are repeated."""

    id: str
    created_at: int
    model: str
    output: list[OutputItem]
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    completed_at: int | None = None
    incomplete_details: IncompleteDetails | None = None
    error: ResponseFailure | None = None
    usage: ResponseUsage | None = None
    object: Literal["response"] = "response"
    store: bool
    background: bool = False
    truncation: Literal["disabled"] = "disabled"
    top_logprobs: int = 0
    service_tier: Literal["default"] = "default"
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    reasoning: Any = None
    text: Any = None
    tool_choice: Any = "auto"
    tools: list[Any] = []
    temperature: float | None = None
    top_p: float | None = None


class InputItemList(msgspec.Struct, frozen=True):
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


# ---- events


class _Event(msgspec.Struct, kw_only=True, tag_field="type"):
    sequence_number: int = 0


class ResponseCreated(_Event, tag="response.created"):
    response: ResponseObject


class ResponseInProgress(_Event, tag="response.in_progress"):
    response: ResponseObject


class ResponseCompleted(_Event, tag="response.completed"):
    response: ResponseObject


class ResponseIncomplete(_Event, tag="response.incomplete"):
    response: ResponseObject


class ResponseFailed(_Event, tag="response.failed"):
    response: ResponseObject


class ItemAdded(_Event, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(_Event, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class PartAdded(_Event, tag="response.content_part.added"):
    item_id: str
    output_index: int
    part: OutputText | ReasoningText
    content_index: int = 0


class PartDone(_Event, tag="response.content_part.done"):
    item_id: str
    output_index: int
    part: OutputText | ReasoningText
    content_index: int = 0


class TextPiece(_Event, tag="response.output_text.delta"):
    item_id: str
    output_index: int
    delta: str
    content_index: int = 0
    logprobs: list[Any] = []


class TextDone(_Event, tag="response.output_text.done"):
    item_id: str
    output_index: int
    text: str
    content_index: int = 0
    logprobs: list[Any] = []


class ReasoningPiece(_Event, tag="response.reasoning_text.delta"):
    item_id: str
    output_index: int
    delta: str
    content_index: int = 0


class ReasoningDone(_Event, tag="response.reasoning_text.done"):
    item_id: str
    output_index: int
    text: str
    content_index: int = 0


class ArgumentsPiece(_Event, tag="response.function_call_arguments.delta"):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(_Event, tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    name: str
    arguments: str


ItemEvent = (
    ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextPiece
    | TextDone
    | ReasoningPiece
    | ReasoningDone
    | ArgumentsPiece
    | ArgumentsDone
)
ResponseEvent = (
    ResponseCreated | ResponseInProgress | ItemEvent | ResponseCompleted | ResponseIncomplete | ResponseFailed
)
