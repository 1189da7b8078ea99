"""Messages between the proxy and its media process, as bytes."""

from __future__ import annotations

import asyncio

import pytest

from tandem.protocol.codec import MAX_MESSAGE_BYTES
from tandem.proxy.media.source import InvalidMedia
from tandem.proxy.reading.media_messages import FROM_PROCESS, TO_PROCESS, MediaJobFailed, read_message
from tandem.proxy.text.prompt import ContextLengthExceeded
from tandem.runtime.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    RequestAborted,
    TandemError,
    WorkerLost,
)


@pytest.mark.parametrize(
    "error",
    [
        InvalidMedia("image 0 (messages): too large", "messages"),
        ContextLengthExceeded("too long", "messages"),
        InvalidRequest("no", "n"),
        Overloaded("full"),
        WorkerLost("the cache is gone"),
        RequestAborted("nobody waits"),
        InternalError("broken"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_their_class_on_the_way_to_the_proxy(error: TandemError) -> None:
    decoded = FROM_PROCESS.decode(FROM_PROCESS.encode(MediaJobFailed.of("lease", error)))
    assert isinstance(decoded, MediaJobFailed)
    assert type(decoded.error) is type(error)
    assert (decoded.error.message, decoded.error.param, decoded.error.code) == (error.message, error.param, error.code)


def test_too_large_and_invalid_messages_are_refused() -> None:
    async def read(data: bytes) -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        await asyncio.wait_for(read_message(reader, TO_PROCESS), 5)

    with pytest.raises(ProtocolError, match="over the limit"):
        asyncio.run(read((MAX_MESSAGE_BYTES + 1).to_bytes(4)))
    with pytest.raises(ProtocolError, match="not an expected message"):
        asyncio.run(read((3).to_bytes(4) + b"abc"))
