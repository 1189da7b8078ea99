"""What the proxy and its media process say to each other, as bytes."""

from __future__ import annotations

import asyncio

import pytest

from tandem.protocol.codec import MAX_MESSAGE_BYTES
from tandem.proxy.api.validation import ModelNotFound
from tandem.proxy.media.source import InvalidMedia
from tandem.proxy.reading.media_jobs import FROM_PROCESS, TO_PROCESS, JobFailed, read_message
from tandem.proxy.text.rendering import ContextLengthExceeded
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
        ModelNotFound("no such model", "model"),
        InvalidRequest("no", "n"),
        Overloaded("full"),
        WorkerLost("the cache is gone"),
        RequestAborted("nobody waits"),
        InternalError("broken"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_reach_the_proxy_as_what_they_are(error: TandemError) -> None:
    told = FROM_PROCESS.decode(FROM_PROCESS.encode(JobFailed.of("lease", error)))
    assert isinstance(told, JobFailed)
    assert type(told.result) is type(error)
    assert (told.result.message, told.result.param, told.result.code) == (error.message, error.param, error.code)


def test_what_is_too_large_or_no_message_is_refused_before_it_is_read() -> None:
    async def read(data: bytes) -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        await asyncio.wait_for(read_message(reader, TO_PROCESS), 5)

    with pytest.raises(ProtocolError, match="over the limit"):
        asyncio.run(read((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little")))
    with pytest.raises(ProtocolError, match="not a message"):
        asyncio.run(read((3).to_bytes(4, "little") + b"abc"))
