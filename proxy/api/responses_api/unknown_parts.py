"""Items and tools of unknown types whose fields have other forms than those of the known types."""

from __future__ import annotations

import msgspec

from tandem.proxy.api.responses_api.responses_request import ITEM_TYPES, TOOL_TYPES
from tandem.proxy.api.skipped_kinds import keep_types


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
    found = [keep_types(document.get("input"), ITEM_TYPES), keep_types(document.get("tools"), TOOL_TYPES)]
    return msgspec.json.encode(document) if any(found) else None
