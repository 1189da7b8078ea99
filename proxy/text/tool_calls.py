"""Tool calls of a chat: their arguments, as clients send them back and as chat templates take them, and their ids."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import string
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import msgspec

from tandem.proxy.text.prompt import Message

INVALID_ARGUMENTS = "INVALID_JSON"
"""Name under which arguments that are no JSON object are shown where only an object is possible."""
_MAX_LEVELS = 200
"""Arguments with more nested values are shown as text: templates write values by recursion, and how far Python lets
them depends on its version. From 3.12 on it reads JSON of more levels than templates can write."""


def template_arguments(given: Any) -> dict[str, Any] | str:
    """Returns the arguments of a call for chat templates: an object, or the text of what is no object.

    given: a JSON value, or a string that contains one. An answer that ends within a call has incomplete arguments, and
    models write other mistakes. The client sends them back with every further message, so none of them is refused.
    Blank arguments and null are an empty object. Those with more than _MAX_LEVELS are text.
    """
    text = given if isinstance(given, str) else ""
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(text) if text.strip() else None
        except (msgspec.DecodeError, RecursionError):
            return text
    if given is None:
        return {}
    if not isinstance(given, dict) or _is_deep(given):
        return text or msgspec.json.encode(given).decode()
    invalid = given.get(INVALID_ARGUMENTS)
    return invalid if len(given) == 1 and isinstance(invalid, str) else given  # as the Messages API shows text


def _is_deep(value: Any) -> bool:
    """Returns whether a JSON value has more than _MAX_LEVELS. Takes time in proportion to its size."""
    level = [value]
    for _ in range(_MAX_LEVELS):
        children = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in children if isinstance(child, (dict, list))]
        if not level:
            return False
    return True


def with_other_arguments(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yields messages for templates that fail with arguments as `template_arguments` returns them.

    First come objects only, for templates that iterate over arguments: text becomes one argument with the name
    INVALID_ARGUMENTS. Then comes JSON only, for templates that concatenate arguments with text, as DeepSeek's do.
    messages: in the form of chat templates.
    """
    given = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
    if any(isinstance(arguments, str) for arguments in given):
        yield [_converted(message, _as_object) for message in messages]
    if any(isinstance(arguments, dict) for arguments in given):
        yield [_converted(message, _as_text) for message in messages]


def _as_object(arguments: dict[str, Any] | str) -> dict[str, Any]:
    return {INVALID_ARGUMENTS: arguments} if isinstance(arguments, str) else arguments


def _as_text(arguments: dict[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _converted(message: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append(call | {"function": function | {"arguments": convert(function["arguments"])}})
    return message | {"tool_calls": calls}


_SHORT_LENGTH = 9
_SHORT = re.compile(rf"[a-zA-Z0-9]{{{_SHORT_LENGTH}}}")
_NO_ID = "\0"
"""Begins the names of calls that have no id."""
_ALPHABET = string.ascii_letters + string.digits


def new_call_id(prefix: str, is_short: bool) -> str:
    """Returns a random id. is_short: nine letters and digits, without the prefix."""
    if is_short:
        return "".join(secrets.choice(_ALPHABET) for _ in range(_SHORT_LENGTH))
    return f"{prefix}{secrets.token_hex(12)}"


def with_short_call_ids(messages: list[Message]) -> list[Message]:
    """Returns the chat with ids of nine letters and digits, for its calls and for the results that name them.

    An id that has this form stays. Others are mapped by their hash, so that they are the same in every turn of a
    conversation, and its prefix stays in the caches. Different ids stay different. Calls without an id get one, and
    results without one belong to the calls of the turn before, in order.
    """
    ids = _ShortIds(messages)
    changed = []
    unanswered: list[str] = []
    for index, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            calls = [call | {"id": ids.of(call.get("id") or f"{_NO_ID}{index}.{i}")} for i, call in enumerate(calls)]
            unanswered = [call["id"] for call in reversed(calls)]
            message = message | {"tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            call_id = unanswered.pop() if unanswered and not given else ids.of(given or f"{_NO_ID}{index}")
            message = message | {"tool_call_id": call_id}
        changed.append(message)
    return changed


class _ShortIds:
    """The short ids of one chat."""

    def __init__(self, messages: list[Message]) -> None:
        given: set[Any] = {message.get("tool_call_id") for message in messages}
        given |= {call.get("id") for message in messages for call in message.get("tool_calls", ())}
        self._by_id = {each: each for each in given if isinstance(each, str) and _SHORT.fullmatch(each)}
        self._taken = set(self._by_id)

    def of(self, call_id: str) -> str:
        if (short := self._by_id.get(call_id)) is None:
            short = next(each for n in count() if (each := _hashed(call_id, n)) not in self._taken)
            self._by_id[call_id] = short
            self._taken.add(short)
        return short


def _hashed(call_id: str, number: int) -> str:
    """number: of the try; another one gives another id."""
    digest = hashlib.sha256(f"{number}:{call_id}".encode(errors="surrogatepass")).digest()
    rest, short = int.from_bytes(digest[:8]), ""
    for _ in range(_SHORT_LENGTH):
        rest, digit = divmod(rest, len(_ALPHABET))
        short += _ALPHABET[digit]
    return short
