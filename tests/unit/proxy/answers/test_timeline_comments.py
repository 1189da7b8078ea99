"""The timeline of a request on its stream: a comment whenever something has happened, and an unchanged stream else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import msgspec
import pytest

from tandem.proxy.answers.answers import DONE
from tandem.proxy.answers.http_answers import MAX_COMMENT_BYTES, TIMELINE_PREFIX, wants_timeline, with_timeline
from tandem.runtime.errors import InvalidRequest
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.telemetry.request_log import MAX_SHOWN_ATTEMPTS, MAX_SHOWN_SEQUENCES, RequestLog, SequenceTimer
from tandem.telemetry.stages import AttemptTimes


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
    assert first.startswith(TIMELINE_PREFIX) and first.endswith(b"\n\ndata: 1\n\n")
    assert second == b"data: 2\n\n"
    comment, _, _ = last.partition(b"\n\n")
    timeline = msgspec.json.decode(comment.removeprefix(TIMELINE_PREFIX))
    assert last.endswith(DONE)
    assert [event["event"] for event in timeline["events"]] == ["arrived", "ended"]


def test_comments_of_many_sequences_are_bounded_and_the_last_one_is_sent() -> None:
    """A stream of 1,024 sequences had 158 MB of comments, which the loop encoded."""
    requests, metrics = RequestLog(), ProxyMetrics()
    record = requests.begin("r", "chat")
    attempts = [[AttemptTimes(0.0, f"attempt-{i}", "prefill-0", "decode-0")] for i in range(1024)]
    record.sequences += [SequenceTimer(metrics, 0.0, each) for each in attempts]

    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(3 * 1024):
            timer, [attempt] = record.sequences[number % 1024], attempts[number % 1024]
            if number < 1024:
                attempt.on_first_token(1.0, 0.0, 0.0)
                timer.on_tokens(1.0, 1)
            elif number < 2 * 1024:
                attempt.on_began(2.0, 0.0, 0.0)
            else:
                timer.on_finished(3.0)
            yield b"data: 1\n\n"
        requests.end(record, "stop")
        yield DONE

    async def read() -> list[bytes]:
        return [event async for event in with_timeline(events(), record)]

    begun = time.process_time()
    received = asyncio.run(read())
    assert time.process_time() - begun < 2
    assert sum(map(len, received)) < MAX_COMMENT_BYTES + 200_000
    last = msgspec.json.decode(received[-1].partition(b"\n\n")[0].removeprefix(TIMELINE_PREFIX))
    assert last["sequences"] == 1024 and last["outcome"] == "stop" and last["stages_s"]
    assert {event.get("sequence") for event in last["events"]} == {None, *range(MAX_SHOWN_SEQUENCES)}


def test_comments_of_many_attempts_are_bounded() -> None:
    """Each attempt changes the timeline."""
    requests, metrics = RequestLog(), ProxyMetrics()
    record = requests.begin("r", "chat")
    attempts: list[list[AttemptTimes]] = [[] for _ in range(MAX_SHOWN_SEQUENCES)]
    record.sequences += [SequenceTimer(metrics, 0.0, each) for each in attempts]

    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(MAX_SHOWN_ATTEMPTS * MAX_SHOWN_SEQUENCES):
            attempts[number % MAX_SHOWN_SEQUENCES].append(
                AttemptTimes(1.0, f"attempt-{number}", "prefill-0", "decode-0")
            )
            yield b"data: 1\n\n"
        requests.end(record, "aborted")
        yield DONE

    async def read() -> list[bytes]:
        return [event async for event in with_timeline(events(), record)]

    received = asyncio.run(read())
    assert sum(map(len, received)) < MAX_COMMENT_BYTES + 200_000
    last = msgspec.json.decode(received[-1].partition(b"\n\n")[0].removeprefix(TIMELINE_PREFIX))
    assert len(last["events"]) == 2 + MAX_SHOWN_ATTEMPTS * MAX_SHOWN_SEQUENCES


def test_the_header_is_checked() -> None:
    assert wants_timeline("1") and not wants_timeline("0") and not wants_timeline(None)
    with pytest.raises(InvalidRequest, match="not 'yes'"):
        wants_timeline("yes")
