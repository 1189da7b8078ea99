"""Ids of tool calls: new ones, and those of clients in the form that chat templates of the Mistral family demand."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from itertools import count
from typing import Any

from tandem.proxy.text.chat_turns import Message

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
