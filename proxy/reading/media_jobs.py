"""What a proxy and its media process say to each other, over a socket pair that only these two hold.

Each message is preceded by its length.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from tandem.protocol.codec import MAX_MESSAGE_BYTES, Codec
from tandem.proxy.api.tool_formats import ToolFormatName
from tandem.proxy.api.validation import GenerationRequest, ModelNotFound
from tandem.proxy.cluster.registry import ModelLimits
from tandem.proxy.media.source import InvalidMedia, MediaLimits
from tandem.proxy.reading.body_reader import BodyKind
from tandem.proxy.text.rendering import ContextLengthExceeded
from tandem.runtime.errors import ErrorInfo, ProtocolError, TandemError

M = TypeVar("M")

_LENGTH_BYTES = 4
_ERRORS: dict[str, type[TandemError]] = {
    error.code: error for error in (InvalidMedia, ContextLengthExceeded, ModelNotFound)
}
"""The front door's own, which workers do not know."""


class MediaSetup(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The first message: what the process needs to know. num_threads: of execution."""

    name: str
    log_level: str
    model: str
    served_model_name: str
    trust_chat_template: bool
    tool_call_parser: ToolFormatName
    trust_remote_code: bool
    cache_endpoint: str
    limits: MediaLimits
    num_threads: int


class MediaJob(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Read this body. path: of a file with its bytes, where `body` has none. lease_id: under which items are cached."""

    lease_id: str
    kind: BodyKind
    body: bytes
    limits: ModelLimits
    path: str = ""


class CancelJob(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Nobody waits for it any more; it is answered all the same."""

    lease_id: str


class AreYouThere(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answered at once, whatever the threads do."""


class IAmHere(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """See AreYouThere."""


class JobBegun(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Its turn has come. Not every job has one before its answer."""

    lease_id: str


class JobDone(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Each job is answered once, by this or by JobFailed: nothing is done under its lease from now on."""

    lease_id: str
    result: GenerationRequest


class JobFailed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """See JobDone."""

    lease_id: str
    error: ErrorInfo

    @classmethod
    def of(cls, lease_id: str, error: TandemError) -> JobFailed:
        return cls(lease_id, ErrorInfo.of(error))

    @property
    def result(self) -> TandemError:
        known = _ERRORS.get(self.error.code)
        return self.error.to_error() if known is None else known(self.error.message, self.error.param)


ToMediaProcess = MediaSetup | MediaJob | CancelJob | AreYouThere
FromMediaProcess = IAmHere | JobBegun | JobDone | JobFailed

TO_PROCESS: Codec[ToMediaProcess] = Codec(ToMediaProcess)
FROM_PROCESS: Codec[FromMediaProcess] = Codec(FromMediaProcess)


async def read_message(reader: asyncio.StreamReader, codec: Codec[M]) -> M:
    """Raises IncompleteReadError when the other end is gone, ProtocolError for what it must not say."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return codec.decode(await reader.readexactly(length))


def write_message(writer: asyncio.StreamWriter, message: ToMediaProcess | FromMediaProcess) -> None:
    data = TO_PROCESS.encode(message)
    writer.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
