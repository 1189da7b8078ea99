"""Adds a request's timeline to its stream of events, as comments that clients of server-sent events skip.

The client sees only the timeline of its own request, whichever proxy serves it, so no id is looked up.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from tandem.runtime.errors import InvalidRequest
from tandem.telemetry.request_log import RequestRecord

HEADER = "x-tandem-timeline"
PREFIX = b": tandem-timeline "
MAX_COMMENT_BYTES = 1 << 20
"""Limit for the comments of a stream. Beyond it only the whole timeline at the end follows."""


def wants_timeline(value: str | None) -> bool:
    """value: of the request's header. Raises InvalidRequest unless it is 0, 1 or missing."""
    if value not in (None, "0", "1"):
        raise InvalidRequest(f"X-Tandem-Timeline must be 1 or 0, not {value!r}.", HEADER)
    return value == "1"


def timeline_comment(record: RequestRecord) -> bytes:
    return PREFIX + msgspec.json.encode(record.timeline()) + b"\n\n"


async def with_timeline(events: AsyncGenerator[bytes, None], record: RequestRecord) -> AsyncGenerator[bytes, None]:
    """Yields the events, each preceded by the timeline if something has happened since the last one."""
    num_known = num_bytes = 0
    async with aclosing(events):
        async for event in events:
            has_ended = record.ended_at is not None
            if (num_bytes < MAX_COMMENT_BYTES or has_ended) and (num_events := record.num_events()) != num_known:
                comment = timeline_comment(record)
                event = comment + event
                num_known, num_bytes = num_events, num_bytes + len(comment)
            yield event
