"""What a proxy and its media process say to each other, over a socket pair that only these two hold.

Pickled, as between a process pool and its processes: both ends are this proxy's own. Each message is preceded by its
length.
"""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass

from protocol.errors import TandemError
from proxy.body_reader import BodyKind
from proxy.media_source import MediaLimits
from proxy.registry import ModelLimits
from proxy.tool_formats import ToolFormatName
from proxy.validation import GenerationRequest

_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class MediaSetup:
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


@dataclass(frozen=True, slots=True)
class MediaJob:
    """Read this body. body: its bytes, or the path of a file with them. lease_id: under which its items are cached."""

    lease_id: str
    kind: BodyKind
    body: bytes | str
    limits: ModelLimits


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Nobody waits for it any more; it is answered all the same."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class JobBegun:
    """Its turn has come. Not every job has one before its answer."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class JobDone:
    """The one answer to each job: nothing is done under its lease from now on."""

    lease_id: str
    result: GenerationRequest | TandemError


async def read_message(reader: asyncio.StreamReader) -> object:
    """Raises IncompleteReadError when the other end is gone."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
    return pickle.loads(await reader.readexactly(length))  # noqa: S301  # of our own other half


def write_message(writer: asyncio.StreamWriter, message: object) -> None:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    writer.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
