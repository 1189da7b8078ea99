"""Arguments of earlier tool calls, as clients send them back and as chat templates take them."""

from __future__ import annotations

from typing import Any

import msgspec

INVALID_ARGUMENTS = "INVALID_JSON"
"""Name under which arguments that are no JSON object are shown where only an object is possible."""


def template_arguments(given: Any) -> dict[str, Any] | str:
    """Returns the arguments of a call for chat templates: an object, or the text of what is no object.

    given: a JSON value, or a string that contains one. An answer that ends within a call has incomplete arguments, and
    models write other mistakes. The client sends them back with every further message, so none of them is refused.
    Blank arguments and null are an empty object.
    """
    text = given if isinstance(given, str) else ""
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(text) if text.strip() else None
        except (msgspec.DecodeError, RecursionError):
            return text
    if given is None:
        return {}
    if not isinstance(given, dict):
        return text or msgspec.json.encode(given).decode()
    invalid = given.get(INVALID_ARGUMENTS)
    return invalid if len(given) == 1 and isinstance(invalid, str) else given  # as the Messages API shows text


def with_object_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Returns messages for templates that iterate over arguments: text becomes one argument named INVALID_ARGUMENTS.

    messages: in the form of chat templates. Returns None if no arguments are text.
    """
    has_text = False
    changed = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if isinstance(text := function["arguments"], str):
                has_text = True
                call = call | {"function": function | {"arguments": {INVALID_ARGUMENTS: text}}}
            calls.append(call)
        changed.append(message | {"tool_calls": calls} if calls else message)
    return changed if has_text else None
