"""A stream is never silent for long, and what is sent meanwhile comes between its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, MutableMapping
from typing import Any

import anthropic
import httpx2
import pytest

from tandem.proxy.answers.answers import DONE
from tandem.proxy.answers.http_answers import KEEP_ALIVE, EventStream, begun
from tandem.proxy.answers.messages import MessageAnswers
from tandem.runtime.errors import Overloaded
from tests.support.async_tests import in_no_time
from tests.support.clocked_loop import run_in_no_time

SHORT_S = 1.0
Events = AsyncGenerator[bytes, None]


async def connected() -> dict[str, Any]:
    await asyncio.sleep(3600)
    return {"type": "http.disconnect"}


async def stream(events: Events, receive: Any = connected, send_s: float = 0.0) -> list[bytes]:
    """Returns the pieces that are sent. send_s: time that the client takes to read each."""
    sent: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(send_s)
            sent.append(message["body"])

    first = await begun(receive, events, SHORT_S)
    response = EventStream(first, events, {}, DONE, lambda error: b"failed %a" % str(error), keep_alive_s=SHORT_S)
    await response({}, receive, send)
    return sent


def sent_by(make_events: Callable[[], Events], **options: Any) -> list[bytes]:
    async def run() -> list[bytes]:
        return await stream(make_events(), **options)

    return run_in_no_time(run())


def test_a_long_wait_for_the_first_and_for_the_next_event_is_bridged() -> None:
    async def events() -> Events:
        await asyncio.sleep(SHORT_S * 5)
        yield b"data: 1\n\n"
        await asyncio.sleep(SHORT_S * 5)
        yield b"data: 2\n\n"
        yield DONE

    sent = sent_by(events)
    first, second = sent.index(b"data: 1\n\n"), sent.index(b"data: 2\n\n")
    assert set(sent[:first]) == {KEEP_ALIVE} and set(sent[first + 1 : second]) == {KEEP_ALIVE}
    assert sent[second + 1 :] == [DONE]


def test_a_stream_that_is_never_silent_has_its_events_only() -> None:
    async def events() -> Events:
        for _ in range(10):
            await asyncio.sleep(SHORT_S / 10)
            yield b"data: 1\n\n"
        yield DONE

    assert sent_by(events) == [b"data: 1\n\n"] * 10 + [DONE]


def test_nothing_comes_within_an_event() -> None:
    async def events() -> Events:
        yield b"data: a long"
        await asyncio.sleep(SHORT_S * 5)
        yield b" event\n\n"
        yield DONE

    assert sent_by(events) == [b"data: a long", b" event\n\n", DONE]


def test_nothing_is_added_to_what_a_slow_client_has_yet_to_read() -> None:
    async def events() -> Events:
        yield b"data: 1\n\n"
        yield DONE

    assert sent_by(events, send_s=SHORT_S * 6) == [b"data: 1\n\n", DONE]


def test_an_early_error_is_raised_and_a_late_one_is_an_event() -> None:
    async def fails(delay_s: float) -> Events:
        await asyncio.sleep(delay_s)
        raise Overloaded("no worker")
        yield b""

    with pytest.raises(Overloaded):
        sent_by(lambda: fails(0.0))
    sent = sent_by(lambda: fails(SHORT_S * 4))
    assert sent[-1] == b"failed 'no worker'" and set(sent[:-1]) == {KEEP_ALIVE}


@pytest.mark.parametrize("leaves_after_s", [0.0, SHORT_S * 3])
def test_a_client_that_leaves_before_the_first_event_ends_the_work(leaves_after_s: float) -> None:
    ended = False

    async def events() -> Events:
        nonlocal ended
        try:
            await asyncio.sleep(3600)
            yield b""
        finally:
            ended = True

    async def leaving() -> dict[str, Any]:
        await asyncio.sleep(leaves_after_s)
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await stream(events(), leaving)
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}

    if leaves_after_s:
        run_in_no_time(run())
    else:
        with pytest.raises(Exception, match="has disconnected"):
            run_in_no_time(run())
    assert ended


@pytest.mark.parametrize("first_after_s", [0.0, SHORT_S * 5])
@in_no_time
async def test_a_client_that_leaves_before_the_head_is_sent_ends_the_work(first_after_s: float) -> None:
    """The head waits while the client has yet to read the answers before it on its connection."""
    ended = False

    async def events() -> Events:
        nonlocal ended
        try:
            await asyncio.sleep(first_after_s)
            yield b"data: 1\n\n"
            yield DONE
        finally:
            ended = True

    async def leaving() -> dict[str, Any]:
        await asyncio.sleep(SHORT_S * 3)
        return {"type": "http.disconnect"}

    async def send(_: MutableMapping[str, Any]) -> None:
        await asyncio.sleep(3600)

    generator = events()
    first = await begun(connected, generator, SHORT_S)
    await EventStream(first, generator, {}, DONE, lambda error: b"")({}, leaving, send)
    assert ended and asyncio.all_tasks() == {asyncio.current_task()}


def test_anthropics_client_skips_pings_wherever_they_come() -> None:
    start = (
        b'event: message_start\ndata: {"type": "message_start", "message": {"id": "m", "type": "message", "role": '
        b'"assistant", "model": "m", "content": [], "stop_reason": null, "stop_sequence": null, '
        b'"usage": {"input_tokens": 1, "output_tokens": 1}}}\n\n'
    )
    sent = MessageAnswers.KEEP_ALIVE + start + MessageAnswers.KEEP_ALIVE + MessageAnswers.END

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=sent)

    client = anthropic.Anthropic(
        api_key="k", base_url="http://x", http_client=httpx2.Client(transport=httpx2.MockTransport(answer))
    )
    with client.messages.stream(max_tokens=1, model="m", messages=[{"role": "user", "content": "a"}]) as events:
        assert [event.type for event in events] == ["message_start", "message_stop"]
