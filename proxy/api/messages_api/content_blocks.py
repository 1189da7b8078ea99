"""Content of messages of Anthropic's Messages API, and what becomes of blocks that the model cannot be shown."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from tandem.proxy.api.skipped_kinds import log_skipped

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


def without_unknown_blocks(body: bytes) -> bytes | None:
    """Returns the body with a block of type `other` in place of each whose type is not known; None if all are known.

    What a user sends for the model to see stays, and is refused. It decodes and encodes the whole body, so it is for
    bodies that were refused.
    """
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
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

    messages = document.get("messages") if isinstance(document, dict) else None
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            replace(message.get("content"), _BLOCK_TYPES, is_user=message.get("role") != "assistant")
    return msgspec.json.encode(document) if has_unknown else None
