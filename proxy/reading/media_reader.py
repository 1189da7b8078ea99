"""The steps of reading a request's images and video that run in the media process's sandboxes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tandem.media_cache.media_segment import write_segment
from tandem.protocol.messages.media import MediaKind
from tandem.protocol.messages.media_cache import CommittedMedia, MediaKey
from tandem.proxy.media.fetch import read_file
from tandem.proxy.media.media_lease import MadeMedia
from tandem.proxy.media.processor import MediaProcessor, MediaSize, PreparedMedia
from tandem.proxy.media.source import MediaSource
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.text.model_files import find_model
from tandem.proxy.text.prompt import CachedMedia, MediaPlaceholder


class MediaContent(msgspec.Struct, frozen=True):
    """An item with its bytes. size: known from its header."""

    source: MediaSource
    data: bytes
    key: MediaKey
    size: MediaSize


class MediaReader:
    """Loads the processor. Raises ConfigError."""

    def __init__(self, config: ProxyConfig) -> None:
        self._limits = config.media
        self.processor = MediaProcessor(find_model(config.model), config.media, config.trust_remote_code)
        self._description: msgspec.msgpack.Decoder[PreparedMedia] = msgspec.msgpack.Decoder(PreparedMedia)

    @property
    def placeholders(self) -> dict[MediaKind, MediaPlaceholder]:
        processor = self.processor
        return {
            kind: MediaPlaceholder(text, processor.token_ids[kind]) for kind, text in processor.placeholders.items()
        }

    def read_file(self, _data: bytes, source: MediaSource) -> bytes:
        """Reads a file in the allowed folder. Raises InvalidMedia."""
        return read_file(source, self._limits)

    def inspect(self, data: bytes, source: MediaSource, cache_salt: str) -> tuple[MediaKey, MediaSize]:
        """Reads the item's header and hashes its bytes. Raises InvalidMedia."""
        size = self.processor.size(source, data)
        return MediaKey(self.processor.digest(source, data, cache_salt), "input"), size

    def size(self, data: bytes, source: MediaSource) -> MediaSize:
        """Reads the item's header. Raises InvalidMedia."""
        return self.processor.size(source, data)

    def write(self, data: bytes, source: MediaSource, key: MediaKey, segment: str) -> CommittedMedia:
        """Decodes and processes the item, and writes its tensors to the cache's segment. Raises InvalidMedia."""
        prepared, tensors = self.processor.prepare(source, data)
        _, num_bytes = write_segment(segment, key, [tensor.data for tensor in tensors])
        return CommittedMedia(key, num_bytes, msgspec.msgpack.encode(prepared))

    def made(self, content: MediaContent, segment: str, description: bytes) -> MadeMedia:
        return MadeMedia(content.key.digest, segment, self._description.decode(description).tensors)

    def cached(self, content: MediaContent, segment: str, description: bytes) -> CachedMedia:
        """Returns what the prompt needs of an item that is in the cache."""
        prepared = self._description.decode(description)
        kind, digest = content.source.kind, content.key.digest
        return CachedMedia(kind, digest, segment, prepared.tensors, prepared.num_tokens, prepared.replacement)


def read_part(path: str, offset: int, num_bytes: int) -> bytes:
    """Returns bytes of a job's file, which is in memory."""
    with Path(path).open("rb") as file:
        file.seek(offset)
        return file.read(num_bytes)


def write_sources(data: list[bytes], segment: str, key: MediaKey) -> CommittedMedia:
    """Writes the bytes of a request's items to the cache's segment."""
    _, num_bytes = write_segment(segment, key, data)
    return CommittedMedia(key, num_bytes, b"")
