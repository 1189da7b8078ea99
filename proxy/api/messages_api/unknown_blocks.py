"""Content blocks of types that the model cannot be shown, such as those of tools that Anthropic runs."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.proxy.api.skipped_kinds import log_skipped

OTHER = "other"


def without_unknown_blocks(body: bytes, known: frozenset[str], known_in_results: frozenset[str]) -> bytes | None:
    """Returns the body with a block of type `other` in place of each whose type is not known; None if all are known.

    What a user sends for the model to see stays, and is refused. It decodes and encodes the whole body, so it is for
    bodies that were refused. known: types of blocks. known_in_results: types of blocks in tool results.
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
                blocks[number] = {"type": OTHER}
                has_unknown = True
            elif kind in ("tool_result", "mcp_tool_result"):
                replace(block.get("content"), known_in_results)

    messages = document.get("messages") if isinstance(document, dict) else None
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            replace(message.get("content"), known, is_user=message.get("role") != "assistant")
    return msgspec.json.encode(document) if has_unknown else None
