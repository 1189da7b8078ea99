"""Bodies of Anthropic's Messages API, the content blocks of their messages, and their conversion to chats.

Blocks that the model cannot be shown become text, or are skipped.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from tandem.proxy.api.chat_prompts import ChatTurns, thinking_switches
from tandem.proxy.api.field_checks import check_stop_strings, refuse_unsupported
from tandem.proxy.api.schema import (
    MAX_CHAT_MESSAGES,
    MAX_FUNCTIONS,
    MAX_STOP_CHARACTERS,
    CacheSalt,
    ChatCompletionRequest,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    JsonObject,
    JsonSchemaFormat,
    MaxTokensOrZero,
    NamedFunction,
    NamedToolChoice,
    OptionalBool,
    Parameters,
    Priority,
    ResponseFormat,
    StopStrings,
    Temperature,
    Tool,
    ToolCall,
    TopK,
    TopP,
    accepts,
    doc,
    neutral_values,
)
from tandem.proxy.api.skipped_kinds import log_skipped
from tandem.proxy.api.structured_output import served_choice
from tandem.runtime.errors import InvalidRequest

_OTHER = "other"


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ToolReferenceBlock(msgspec.Struct, tag_field="type", tag="tool_reference"):
    """A tool that a search has found. The model sees all tools, so it gets the name as text."""

    tool_name: str


class SearchResultBlock(msgspec.Struct, tag_field="type", tag="search_result"):
    """The model gets it as text; citations are ignored."""

    content: list[TextBlock]
    source: str
    title: str


class PlainTextSource(msgspec.Struct, tag_field="type", tag="text"):
    data: str


class TextContentSource(msgspec.Struct, tag_field="type", tag="content"):
    content: str | list[TextBlock]


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    """source: of text. Citations are ignored."""

    source: PlainTextSource | TextContentSource
    title: str | None = None
    context: str | None = None


class Base64Source(msgspec.Struct, tag_field="type", tag="base64"):
    data: str
    media_type: Annotated[str, Meta(max_length=256, description="image/png, image/jpeg, image/webp or image/gif")]


class UrlSource(msgspec.Struct, tag_field="type", tag="url"):
    url: str


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    source: Base64Source | UrlSource


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """input: an object; other values, which models write by mistake, are taken too."""

    id: str
    name: str
    input: Any


class OtherBlock(msgspec.Struct, tag_field="type", tag=_OTHER):
    """Stands for a block of a type that the model cannot be shown. Ignored."""


ResultContent = (
    str | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | OtherBlock] | None
)


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """is_error is ignored: the content says what went wrong."""

    tool_use_id: str
    content: ResultContent = None


class McpToolUseBlock(msgspec.Struct, tag_field="type", tag="mcp_tool_use"):
    """A call that Anthropic's server has made. The model gets it as a call of its own."""

    id: str
    name: str
    input: Any


class McpToolResultBlock(msgspec.Struct, tag_field="type", tag="mcp_tool_result"):
    tool_use_id: str
    content: ResultContent = None


class CompactionBlock(msgspec.Struct, tag_field="type", tag="compaction"):
    """A summary of what came before. The model gets it as text."""

    content: str | None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Earlier thinking. Its signature is ignored."""

    thinking: str


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Ignored: only the server that encrypted it can read it."""


AnyTextBlock = TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock
Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | McpToolUseBlock
    | McpToolResultBlock
    | CompactionBlock
    | OtherBlock
)


def _tags(*kinds: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(str(kind.__struct_config__.tag) for kind in kinds)


_BLOCK_TYPES = _tags(*get_args(Block))
_RESULT_BLOCK_TYPES = _tags(TextBlock, ImageBlock, DocumentBlock, SearchResultBlock, ToolReferenceBlock, OtherBlock)


def skip_blocks(body: dict[str, Any]) -> bool:
    """Puts a block of type `other` in place of each whose type is not known. Returns whether there were any.

    What a user sends for the model to see stays, and is refused.
    """
    has_unknown = False

    def replace(blocks: Any, types: frozenset[str], *, is_user: bool = False) -> None:
        nonlocal has_unknown
        for number, block in enumerate(blocks if isinstance(blocks, list) else ()):
            if not isinstance(block, dict) or not isinstance(kind := block.get("type"), str):
                continue
            if kind not in types and (not is_user or kind == "container_upload" or kind.endswith("_tool_result")):
                log_skipped("content blocks", kind)
                blocks[number] = {"type": _OTHER}
                has_unknown = True
            elif kind in ("tool_result", "mcp_tool_result"):
                replace(block.get("content"), _RESULT_BLOCK_TYPES)

    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            replace(message.get("content"), _BLOCK_TYPES, is_user=message.get("role") != "assistant")
    return has_unknown


_CHANGING_SYSTEM_TEXT = "x-anthropic-billing-header:"
"""Claude Code's first block of system text begins with this. It differs in every request, so no request would find the
prefix of another one in a cache."""


# ---- messages, tools and output


class InputMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class InputTool(msgspec.Struct):
    """A tool that the client runs. Tools that Anthropic's servers run, which have no input_schema, are skipped.

    type: null and custom require name and input_schema. bash, text_editor and memory, with their dates, have schemas
    of their own. input_schema: JSON schema of the arguments.
    """

    name: FunctionName | None = None
    input_schema: Parameters = None
    description: str | None = None
    strict: bool | None = None
    type: str | None = None

    def __post_init__(self) -> None:
        if self.type in (None, "custom"):
            for field in ("name", "input_schema"):
                if getattr(self, field) is None:
                    raise ValueError(f"Object missing required field `{field}`")

    def function(self) -> FunctionDefinition | None:
        """Returns the function that the model gets; None for a tool that is skipped."""
        if self.name is None:
            return None
        if self.input_schema is not None:
            return FunctionDefinition(self.name, self.description, self.input_schema, self.strict)
        return client_function(self.type or "", self.name)


class ToolChoice(msgspec.Struct):
    """name: of the tool, if the type is tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: OptionalBool = None


class ThinkingConfig(msgspec.Struct):
    """type: unless it is disabled, the chat template decides where the model thinks. budget_tokens: tokens of thinking
    after which the answer must begin; -1 for no limit. display: omitted leaves the thinking out of the answer.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputSchema(msgspec.Struct):
    schema: JsonObject
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct):
    """effort: see reasoning_effort of chat completions."""

    format: OutputSchema | None = None
    effort: str | None = None


# ---- requests


class PromptFields(msgspec.Struct, kw_only=True):
    """Fields that make the prompt, and that both routes take. Unknown fields are ignored."""

    model: Annotated[str | None, doc("a name from /v1/models; null and empty select the served model")] = None
    messages: Annotated[
        Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_CHAT_MESSAGES)],
        doc("the chat; an answer continues a last message of the assistant"),
    ]
    system: Annotated[str | list[TextBlock] | None, doc("the system prompt")] = None
    tools: Annotated[
        Annotated[list[InputTool], Meta(max_length=MAX_FUNCTIONS)] | None, doc("functions that the model may call")
    ] = None
    tool_choice: Annotated[ToolChoice | None, doc("whether the answer may or must call tools, or which one")] = None
    thinking: Annotated[
        ThinkingConfig | None,
        doc("sets `enable_thinking` and `thinking` for the chat template; without effect if the model does not think"),
    ] = None
    output_config: Annotated[OutputConfig | None, doc("JSON output with a schema; effort of thinking")] = None
    mcp_servers: Annotated[list[JsonObject] | None, doc("ignored: the model cannot call their tools")] = None
    container: Annotated[Any, accepts()] = None


class MessageRequest(PromptFields, kw_only=True):
    """Anthropic's `/v1/messages`."""

    max_tokens: Annotated[
        MaxTokensOrZero,
        doc("fewer are generated if fewer fit; 0 computes the prompt, for the prefix cache, and no answer"),
    ]
    stop_sequences: Annotated[
        StopStrings | None,
        doc(f"strings that end the text, of at most {MAX_STOP_CHARACTERS} characters together; not part of it"),
    ] = None
    stream: Annotated[OptionalBool, doc("server-sent events")] = False
    temperature: Annotated[Temperature | None, doc("0 is greedy decoding; null: the model's default, else 1")] = None
    top_p: Annotated[TopP | None, doc("samples from the most likely tokens with this total probability")] = None
    top_k: Annotated[TopK | None, doc("samples from this many most likely tokens")] = None
    priority: Annotated[Priority | None, doc("lower values are served first; not of Anthropic's API")] = 0
    cache_salt: Annotated[
        CacheSalt | None, doc("requests with different salts share no cached prefix; not of Anthropic's API")
    ] = None


class CountTokensRequest(PromptFields, kw_only=True):
    """Anthropic's `/v1/messages/count_tokens`."""


def to_chat(request: MessageRequest | CountTokensRequest, can_think: bool) -> tuple[ChatCompletionRequest, list[str]]:
    """Returns the chat, and for each of its messages the one of the request that it begins with, for errors.

    can_think: the server separates the model's thinking. Raises InvalidRequest.
    """
    refuse_unsupported(request, _NEUTRAL_VALUES)
    turns = _MessageTurns(request)
    chat = ChatCompletionRequest(messages=turns.messages, model=request.model)
    is_prefilled = request.messages[-1].role == "assistant"
    chat.continue_final_message, chat.add_generation_prompt = is_prefilled, not is_prefilled
    given = request.tools or []
    functions = [tool.function() for tool in given]
    chat.tools = [Tool(function) for function in functions if function is not None] or None
    skipped = [tool for tool, function in zip(given, functions, strict=True) if function is None]
    for tool in skipped:
        log_skipped("tools", tool.type or "")
    if request.mcp_servers:
        log_skipped("tools", "mcp_servers")
    if request.tool_choice is not None:
        chat.tool_choice = served_choice(
            _tool_choice(request.tool_choice),
            chat.tools or [],
            has_skipped=bool(skipped or request.mcp_servers),
            skipped_names={tool.name for tool in skipped if tool.name is not None},
        )
        chat.parallel_tool_calls = not request.tool_choice.disable_parallel_tool_use
    if (thinking := request.thinking) is not None:
        is_wanted = thinking.type != "disabled"
        chat.chat_template_kwargs = thinking_switches(is_wanted)
        chat.include_reasoning = thinking.display != "omitted"
        if is_wanted and can_think:
            chat.thinking_token_budget = thinking.budget_tokens
    if (output := request.output_config) is not None:
        chat.reasoning_effort = output.effort
        if output.format is not None:
            chat.response_format = ResponseFormat(
                "json_schema", JsonSchemaFormat("answer", schema=output.format.schema, strict=True)
            )
    if isinstance(request, MessageRequest):
        check_stop_strings(request.stop_sequences or (), "stop_sequences")
        chat.stop, chat.stream = request.stop_sequences, request.stream
        chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
        chat.priority, chat.cache_salt = request.priority, request.cache_salt
    return chat, turns.params


_NEUTRAL_VALUES = neutral_values(PromptFields)


class _MessageTurns(ChatTurns):
    """Consecutive messages of one role are one turn, as in Anthropic's API."""

    def __init__(self, request: PromptFields) -> None:
        super().__init__()
        system = [TextBlock(request.system)] if isinstance(request.system, str) else request.system or []
        if parts := [_part(block) for block in system if not block.text.startswith(_CHANGING_SYSTEM_TEXT)]:
            self.begin("system", "system").content = parts
        for number, message in enumerate(request.messages):
            param = f"messages[{number}]"
            blocks = [TextBlock(message.content)] if isinstance(message.content, str) else message.content
            if not blocks:
                self.turn(message.role, param)
            for index, block in enumerate(blocks):
                self._add(message.role, block, param, f"{param}.content[{index}]")
        self.finish()
        for turn in self.messages:
            turn.content = turn.content if turn.content is not None else ""

    def _add(self, role: str, block: Block, param: str, block_param: str) -> None:
        match block:
            case ToolResultBlock() | McpToolResultBlock():
                if isinstance(block, ToolResultBlock):
                    _check_role(role, "user", "tool_result", block_param)
                content = block.content
                blocks = [TextBlock(content)] if isinstance(content, str) else content or []
                answer = self.begin("tool", param)
                answer.tool_call_id = block.tool_use_id
                answer.content = [_part(each) for each in blocks if not isinstance(each, ImageBlock | OtherBlock)]
                for each in blocks:
                    if isinstance(each, ImageBlock):  # templates of tool messages take text only
                        self._add("user", each, param, block_param)
            case ToolUseBlock() | McpToolUseBlock():
                _check_role(role, "assistant", "tool_use", block_param)
                self.add_call(param, ToolCall(FunctionCall(block.name, block.input), block.id))
            case ThinkingBlock():
                _check_role(role, "assistant", "thinking", block_param)
                self.add_thoughts(param, [block.thinking])
            case RedactedThinkingBlock():
                _check_role(role, "assistant", "redacted_thinking", block_param)
                self.turn(role, param)
            case CompactionBlock():
                self.add_parts(role, param, [ContentPart("text", block.content)] if block.content else [])
            case OtherBlock():
                self.turn(role, param)
            case TextBlock() | ImageBlock() | DocumentBlock() | SearchResultBlock():
                self.add_parts(role, param, [_part(block)])


def _check_role(role: str, expected: str, kind: str, param: str) -> None:
    if role != expected:
        raise InvalidRequest(f"{param} is a {kind} block, which only {expected} messages may have.", param)


def _part(block: AnyTextBlock | ImageBlock) -> ContentPart:
    if not isinstance(block, ImageBlock):
        return ContentPart("text", _text(block))
    source = block.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return ContentPart("image_url", image_url=url)


def _text(block: AnyTextBlock) -> str:
    match block:
        case TextBlock():
            return block.text
        case ToolReferenceBlock():
            return block.tool_name
        case SearchResultBlock():
            return "\n".join([block.title, block.source, *(each.text for each in block.content)])
        case DocumentBlock(source=source):
            content = source.data if isinstance(source, PlainTextSource) else source.content
            text = content if isinstance(content, str) else "\n".join(each.text for each in content)
            return "\n".join([each for each in (block.title, block.context) if each] + [text])


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise InvalidRequest("tool_choice has type 'tool' but no name; add the name of a tool.", "tool_choice.name")
    return NamedToolChoice(NamedFunction(choice.name))


# Tools of Anthropic that come without a schema and that the client runs. Models of other makers do not know them, so
# they get functions with the schemas that Anthropic documents.
_TEXT: JsonObject = {"type": "string"}
_LINE: JsonObject = {"type": "integer", "minimum": 0}
_RANGE: JsonObject = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}


def _schema(required: list[str], **properties: Any) -> JsonObject:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_EDITED: dict[str, JsonObject] = {
    "path": _TEXT, "view_range": _RANGE, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT,
    "insert_line": _LINE, "insert_text": _TEXT,
}  # fmt: skip
_FUNCTIONS: dict[str, tuple[str, JsonObject]] = {
    "bash": (
        "Runs a command in a shell session that persists between calls. restart starts a new session.",
        _schema([], command=_TEXT, restart={"type": "boolean"}),
    ),
    "text_editor": (
        "Views and edits files. view shows a file or folder, or the lines of view_range. create writes file_text. "
        "str_replace replaces old_str, which must occur once, by new_str. insert adds insert_text after insert_line.",
        _schema(
            ["command", "path"],
            command={"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            **_EDITED,
        ),
    ),
    "memory": (
        "Keeps notes in files below /memories. view shows a file or folder. create writes file_text. str_replace "
        "replaces old_str by new_str. insert adds insert_text at insert_line. delete removes path. rename moves "
        "old_path to new_path.",
        _schema(
            ["command"],
            command={"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            **_EDITED,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
}  # fmt: skip
"""Description and schema, by the type without its date."""


def client_function(type_: str, name: str) -> FunctionDefinition | None:
    """Returns the function of a tool, such as type `bash_20250124`, or None for a tool that the client does not run."""
    found = _FUNCTIONS.get(type_.rpartition("_")[0])
    return None if found is None else FunctionDefinition(name, *found)
