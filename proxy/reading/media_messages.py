"""Messages between a proxy and its media process, over a private socket pair. A length precedes each message."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from tandem.protocol.codec import MAX_MESSAGE_BYTES, Codec
from tandem.protocol.messages.media import MediaKind
from tandem.proxy.media.media_lease import MadeMedia
from tandem.proxy.media.media_source_bytes import HeldSources
from tandem.proxy.media.source import InvalidMedia, SentMedia
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.text.prompt import CachedMedia, ContextLengthExceeded, MediaPlaceholder
from tandem.runtime.errors import ErrorInfo, ProtocolError, TandemError

M = TypeVar("M")

ENTRY, MEDIA_FD, THREADS_FD = "media", 3, 4
"""Entry of the fork server, and descriptors of the channel and of `BusyThreads` in the media process."""
EXIT_BAD_CONFIG = 2
"""Exit status of a media process that cannot load the model's processor."""
_LENGTH_BYTES = 4
_PROXY_ERRORS: dict[str, type[TandemError]] = {error.code: error for error in (InvalidMedia, ContextLengthExceeded)}
"""Errors of the proxy's own, which `ErrorInfo.to_error` does not know."""


class MediaSetup(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The first message: the configuration of the proxy."""

    config: ProxyConfig


class MediaJob(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The images and videos of a request, to be made into tensors."""

    lease_id: str
    """Lease under which they are cached."""
    items: list[SentMedia]
    path: str
    """File with the bytes of those that came in data URLs."""
    cache_salt: str
    max_model_len: int
    client: str = ""
    """Threads and downloads are shared among clients."""
    is_suspect: bool = False
    """Whether each item is alone on the threads, because the job was on one when a process was lost."""


class RemakeMedia(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Makes the pixels of a running request again, which must migrate after they were released."""

    lease_id: str
    """Lease under which they are cached."""
    sources: HeldSources
    client: str = ""
    is_suspect: bool = False
    """As that of a MediaJob."""


class CancelMediaJob(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The client is gone. The job is answered nevertheless."""

    lease_id: str


class PingMediaProcess(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Asks for MediaProcessAlive, which is sent at once even if all threads are busy."""


class MediaProcessAlive(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The answer to PingMediaProcess."""


class MediaJobDone(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The answer to a MediaJob. After it the process no longer uses the lease."""

    lease_id: str
    media: list[CachedMedia]
    """One for each item of the job, in order."""
    placeholders: dict[MediaKind, MediaPlaceholder]
    sources: HeldSources
    """The bytes that the client sent, held by the same lease."""


class MediaRemade(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The answer to RemakeMedia. After it the process no longer uses the lease."""

    lease_id: str
    items: list[MadeMedia]


class MediaJobFailed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The other answer to a MediaJob or to RemakeMedia. After it the process no longer uses the lease."""

    lease_id: str
    info: ErrorInfo

    @classmethod
    def of(cls, lease_id: str, error: TandemError) -> MediaJobFailed:
        return cls(lease_id, ErrorInfo.of(error))

    @property
    def error(self) -> TandemError:
        known = _PROXY_ERRORS.get(self.info.code)
        return self.info.to_error() if known is None else known(self.info.message, self.info.param)


ToMediaProcess = MediaSetup | MediaJob | RemakeMedia | CancelMediaJob | PingMediaProcess
FromMediaProcess = MediaProcessAlive | MediaJobDone | MediaRemade | MediaJobFailed

TO_PROCESS: Codec[ToMediaProcess] = Codec(ToMediaProcess)
FROM_PROCESS: Codec[FromMediaProcess] = Codec(FromMediaProcess)


async def read_message(reader: asyncio.StreamReader, codec: Codec[M]) -> M:
    """Raises IncompleteReadError when the other end is closed, ProtocolError for an invalid message."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return codec.decode(await reader.readexactly(length))


def write_message(writer: asyncio.StreamWriter, message: ToMediaProcess | FromMediaProcess) -> None:
    data = TO_PROCESS.encode(message)
    writer.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
