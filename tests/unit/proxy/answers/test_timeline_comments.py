"""The timeline of a request on its stream: a comment whenever something has happened, and an unchanged stream else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from tandem.proxy.answers.answers import DONE
from tandem.proxy.answers.timeline_comments import PREFIX, wants_timeline, with_timeline
from tandem.runtime.errors import InvalidRequest
from tandem.telemetry.request_log import RequestLog


def test_a_comment_precedes_the_events_after_which_something_happened() -> None:
    requests = RequestLog()
    record = requests.begin("r", "chat")

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"
        requests.end(record, "stop")
        yield DONE

    async def read() -> list[bytes]:
        return [event async for event in with_timeline(events(), record)]

    first, second, last = asyncio.run(read())
    assert first.startswith(PREFIX) and first.endswith(b"\n\ndata: 1\n\n")
    assert second == b"data: 2\n\n"
    comment, _, _ = last.partition(b"\n\n")
    timeline = msgspec.json.decode(comment.removeprefix(PREFIX))
    assert last.endswith(DONE)
    assert [event["event"] for event in timeline["events"]] == ["arrived", "ended"]


def test_the_header_is_checked() -> None:
    assert wants_timeline("1") and not wants_timeline("0") and not wants_timeline(None)
    with pytest.raises(InvalidRequest, match="not 'yes'"):
        wants_timeline("yes")
