"""An answer's head goes out with what follows it, in order, and never stays behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.proxy.answers.event_stream import DONE, EventStream
from tandem.proxy.http.connection import _BoundedReads
from tandem.proxy.http.transport import JoinedHeads

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Recorder:
    """What a transport was told, in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        assert not self.closing, "written to after its end"
        self.calls.append(data)

    def write_eof(self) -> None:
        self.calls.append("eof")

    def close(self) -> None:
        self.calls.append("close")
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing


async def _told(*steps: Any) -> list[Any]:
    """steps: bytes to write, the name of a call, or None for a turn of the loop."""
    recorder = Recorder()
    transport = JoinedHeads(recorder, asyncio.get_running_loop())  # type: ignore[arg-type]
    for step in steps:
        if step is None:
            await asyncio.sleep(0)
        elif isinstance(step, bytes):
            transport.write(step)
        else:
            getattr(transport, step)()
    await asyncio.sleep(0)
    return recorder.calls


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ((HEAD, b"ok"), [HEAD + b"ok"]),
        ((HEAD, b"o", b"k"), [HEAD + b"o", b"k"]),
        ((HEAD, None, b"ok"), [HEAD, b"ok"]),
        ((HEAD,), [HEAD]),
        ((HEAD, "close"), [HEAD, "close"]),
        ((HEAD, "write_eof"), [HEAD, "eof"]),
        ((HEAD, b"ok", HEAD, b"ok"), [HEAD + b"ok", HEAD + b"ok"]),
        ((HEAD, "abort"), []),
    ],
)
def test_what_goes_out(steps: tuple[Any, ...], told: list[Any]) -> None:
    assert asyncio.run(_told(*steps)) == told


def test_what_a_protocol_is_given_joins_heads() -> None:
    recorder = Recorder()

    class Protocol:
        loop = asyncio.new_event_loop()

        def connection_made(self, transport: Any) -> None:
            transport.writelines([HEAD])
            transport.write(b"ok")

    _BoundedReads(Protocol()).connection_made(recorder)  # type: ignore[arg-type]
    Protocol.loop.close()
    assert recorder.calls == [HEAD + b"ok"]


def test_the_end_of_a_stream_goes_out_with_its_last_event() -> None:
    async def events() -> Any:
        yield b"data: {}\n\n"
        yield DONE

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        stream = EventStream(b"data: 1\n\n", events(), "id").to_asgi_response(None, None)
        await stream({}, receive, send)  # type: ignore[arg-type, typeddict-item]

    asyncio.run(run())
    assert [(message["body"], message["more_body"]) for message in sent[1:]] == [
        (b"data: 1\n\n", True), (b"data: {}\n\n", True), (DONE, False),
    ]  # fmt: skip
