"""The log of a run: what happened to processes, messages and blocks. It becomes text only when it is read."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tandem.protocol.messages.dispatch import PrepareDecode, StartPrefill
from tandem.protocol.messages.packed import unpack_token_ids
from tandem.simulator.scenario import Request

MAX_ENTRIES = 500_000
"""Earlier ones are dropped. A seed has 3,000 in the mean."""
_SHOWN = ("_id", "_ids", "epoch", "reason", "_block", "_blocks")
"""Ends of the names of fields that are shown of a message."""


class EventLog:
    """Notes of one run, in the order of virtual time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: deque[tuple[float, str, tuple[Any, ...]]] = deque(maxlen=MAX_ENTRIES)

    def note(self, text: str, *args: Any) -> None:
        """Adds a line. args: fill the text when it is read, as those of `logging`; not changed until then."""
        self._entries.append((self._clock(), text, args))

    def on_message(self, sender: str, receiver: str, message: Any) -> None:
        """Adds the delivery of a message between two processes."""
        self._entries.append((self._clock(), "", (sender, receiver, message)))

    def lines(self) -> Iterator[str]:
        for at, text, args in self._entries:
            if text:
                yield f"{at:.6f} {text % args if args else text}"
            else:
                yield f"{at:.6f} {args[0]} > {args[1]}: {described(args[2])}"

    def story(self, details: str, requests: tuple[Request, ...]) -> list[str]:
        """Returns the lines about the requests and the block that a violation names, and about all processes."""
        numbers = {
            int(each) for found in re.findall(r"requests? \[?([\d, ]+)", details) for each in re.findall(r"\d+", found)
        }
        prompts = {prompt for request in requests if request.number in numbers for prompt in request.prompts}
        sent = [
            args[2] for _, text, args in self._entries if not text and isinstance(args[2], StartPrefill | PrepareDecode)
        ]
        words = set(re.findall(r"[\w-]+", details))
        prompts |= {_prompt(each) for each in sent if words & {each.transfer_id, *each.attempt_ids}}
        ids = {id_ for each in sent if _prompt(each) in prompts for id_ in (each.transfer_id, *each.attempt_ids)}
        ids |= {f"request {request.number}" for request in requests if prompts & set(request.prompts)}
        wanted = [re.escape(each) for each in sorted(ids)]
        wanted += [rf"{name}\b.*block.*\b{block}" for name, block in re.findall(r"([\w-]+): block (\d+)", details)]
        is_wanted = re.compile(rf"(?<![\w-])(?:{'|'.join(wanted)})(?![\w-])" if wanted else "$^").search
        is_shown = [bool(text) and not text.startswith(("request ", "%s: ")) for _, text, _ in self._entries]
        return [line for line, shown in zip(self.lines(), is_shown, strict=True) if shown or is_wanted(line)]


def _prompt(message: StartPrefill | PrepareDecode) -> tuple[int, ...]:
    """Returns the prompt of the request, without what earlier attempts have generated."""
    token_ids = unpack_token_ids(message.token_ids)
    return tuple(token_ids[: len(token_ids) - message.num_generated])


def described(message: Any) -> str:
    """Returns a message's type and the ids in it."""
    parts: list[str] = []
    for name in message.__struct_fields__ if isinstance(message, msgspec.Struct) else ():
        value = getattr(message, name)
        if isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
            parts += map(described, value)
        elif name.endswith(_SHOWN) and value is not None and not isinstance(value, bytes):
            parts.append(f"{name}={value}")
    return f"{type(message).__name__}({', '.join(parts)})"
