"""Server-sent events as clients of the APIs read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

END = "[DONE]"
"""Last event of OpenAI's streams."""
_PREFIX = "data: "


def event_of(line: str | bytes) -> Any:
    """Returns the JSON of the event in a line of a stream, or None for the end and for lines without an event."""
    text = line if isinstance(line, str) else line.decode()
    return json.loads(text.removeprefix(_PREFIX)) if text.startswith(_PREFIX + "{") else None


def events_of(lines: Iterable[str | bytes]) -> Iterator[Any]:
    """Yields the JSON of each event as it arrives."""
    for line in lines:
        if (event := event_of(line)) is not None:
            yield event


def whole_stream(text: str) -> list[Any]:
    """Returns the events of a stream that has ended with END. Raises AssertionError for one that has not."""
    *lines, end = [line for line in text.split("\n\n") if line]
    assert end == _PREFIX + END and all(line.startswith(_PREFIX) for line in lines), text
    return [event_of(line) for line in lines]
