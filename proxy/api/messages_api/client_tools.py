"""Tools of Anthropic that come without a schema and that the client runs: the functions that the model gets for them.

Models of other makers do not know these tools, so the schemas are the ones that Anthropic documents.
"""

from __future__ import annotations

from typing import Any

from tandem.proxy.api.chat_messages import JsonObject
from tandem.proxy.api.output_fields import FunctionDefinition

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
