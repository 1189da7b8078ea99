"""Items and tools of unknown types whose fields have other forms than those of the known types."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.proxy.api.responses_api.responses_request import ITEM_TYPES, TOOL_TYPES


def without_unknown_fields(body: bytes) -> bytes | None:
    """Returns the body whose items and tools of unknown types, which are skipped, have no field but their type.

    It decodes and encodes the whole body, so it is for bodies that were refused. Returns None if there is nothing to
    leave out.
    """
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    found = [_strip(document.get("input"), ITEM_TYPES), _strip(document.get("tools"), TOOL_TYPES)]
    return msgspec.json.encode(document) if any(found) else None


def _strip(parts: Any, known: tuple[str, ...]) -> bool:
    """Returns whether there was a part of an unknown type with more fields."""
    found = False
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in known and len(part) > 1:
            parts[number] = {"type": kind}
            found = True
    return found
