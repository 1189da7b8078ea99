"""Answers and events of OpenAI's Responses API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

RESPONSE_ID_PREFIX = "resp_"


def item_id(kind: str, number: int, response_id: str) -> str:
    """Returns the id of an answer's item, which tells the answer, so that requests may refer to the item alone."""
    return f"{kind}_{number}_{response_id.removeprefix(RESPONSE_ID_PREFIX)}"


def response_of(item_id: str) -> str:
    """Returns the id of the response whose answer has the item; of no response for other ids."""
    return RESPONSE_ID_PREFIX + "_".join(item_id.split("_")[2:])


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


class CustomCallItem(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    """input: any text."""

    id: str
    call_id: str
    name: str
    input: str = ""
    status: ItemStatus = "in_progress"
    namespace: str | None = None


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomCallItem


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


class _ItemEvent(_Event, kw_only=True):
    output_index: int


class _GrowthEvent(_ItemEvent, kw_only=True):
    item_id: str


class _ContentEvent(_GrowthEvent, kw_only=True):
    content_index: int = 0


class ItemAdded(_ItemEvent, tag="response.output_item.added"):
    item: OutputItem


class ItemDone(_ItemEvent, tag="response.output_item.done"):
    item: OutputItem


class PartAdded(_ContentEvent, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_ContentEvent, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextPiece(_ContentEvent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[Any] = []


class OutputTextDone(_ContentEvent, tag="response.output_text.done"):
    text: str
    logprobs: list[Any] = []


class ReasoningPiece(_ContentEvent, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_ContentEvent, tag="response.reasoning_text.done"):
    text: str


class ArgumentsPiece(_GrowthEvent, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_GrowthEvent, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class CustomInputPiece(_GrowthEvent, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomInputDone(_GrowthEvent, tag="response.custom_tool_call_input.done"):
    input: str


ItemEvent = (
    ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | OutputTextPiece
    | OutputTextDone
    | ReasoningPiece
    | ReasoningDone
    | ArgumentsPiece
    | ArgumentsDone
    | CustomInputPiece
    | CustomInputDone
)
ResponseEvent = (
    ResponseCreated | ResponseInProgress | ItemEvent | ResponseCompleted | ResponseIncomplete | ResponseFailed
)
