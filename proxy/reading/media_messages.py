"""Messages between a proxy and its media process, over a private socket pair."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from tandem.protocol.codec import MAX_MESSAGE_BYTES, Codec
from tandem.protocol.messages.media import MediaKind
from tandem.proxy.media.media_lease import HeldSources, MadeMedia
from tandem.proxy.media.source import SentMedia
from tandem.proxy.text.prompt import CachedMedia, MediaPlaceholder
from tandem.runtime.errors import ErrorInfo, TandemError
from tandem.runtime.processes.sandbox import read_frame, to_error, write_frame

M = TypeVar("M")

MEDIA_FD, CONFIG_FD = 3, 4
"""Descriptors of the channel and of the proxy's configuration in the media process."""
EXIT_BAD_CONFIG = 2
"""Exit status of a media process that cannot load the model's processor."""


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
    """Sandboxes and downloads are shared among clients."""


class RemakeMedia(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Makes the pixels of a running request again, which must migrate after they were released."""

    lease_id: str
    """Lease under which they are cached."""
    sources: HeldSources
    client: str = ""


class CancelMediaJob(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The client is gone. The job is answered nevertheless."""

    lease_id: str


class PingMediaProcess(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Asks for MediaProcessAlive, which is sent at once even if all sandboxes are busy."""


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
        return to_error(self.info)


ToMediaProcess = MediaJob | RemakeMedia | CancelMediaJob | PingMediaProcess
FromMediaProcess = MediaProcessAlive | MediaJobDone | MediaRemade | MediaJobFailed

TO_PROCESS: Codec[ToMediaProcess] = Codec(ToMediaProcess)
FROM_PROCESS: Codec[FromMediaProcess] = Codec(FromMediaProcess)


async def read_message(reader: asyncio.StreamReader, codec: Codec[M]) -> M:
    """Raises IncompleteReadError when the other end is closed, ProtocolError for an invalid message."""
    return codec.decode(await read_frame(reader, MAX_MESSAGE_BYTES))


def write_message(writer: asyncio.StreamWriter, message: ToMediaProcess | FromMediaProcess) -> None:
    write_frame(writer, TO_PROCESS.encode(message))
