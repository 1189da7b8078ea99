"""The steps of reading a request's images and video that run on the media process's threads."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tandem.media_cache.media_segment import write_segment
from tandem.protocol.messages.media import MediaKind
from tandem.protocol.messages.media_cache import CommittedMedia, MediaKey
from tandem.proxy.media.fetch import read_file
from tandem.proxy.media.media_lease import MadeMedia
from tandem.proxy.media.media_source_bytes import HeldSources, read_sources
from tandem.proxy.media.processor import MediaProcessor, MediaSize, PreparedMedia
from tandem.proxy.media.source import MediaSource, SentMedia
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

    def inspect(self, item: SentMedia, path: str, fetched: bytes | None, cache_salt: str) -> MediaContent:
        """Reads the item's header and hashes its bytes. Raises InvalidMedia.

        path: of the job's file. fetched: bytes of a remote item.
        """
        source = item.source
        if fetched is not None:
            data = fetched
        elif item.num_bytes is not None:
            with Path(path).open("rb") as file:
                file.seek(item.offset)
                data = file.read(item.num_bytes)
        else:
            data = read_file(source, self._limits)
        size = self.processor.size(source, data)
        return MediaContent(source, data, MediaKey(self.processor.digest(source, data, cache_salt), "input"), size)

    def write(self, content: MediaContent, segment: str) -> CommittedMedia:
        """Decodes and processes the item, and writes its tensors to the cache's segment. Raises InvalidMedia."""
        prepared, tensors = self.processor.prepare(content.source, content.data)
        _, num_bytes = write_segment(segment, content.key, [tensor.data for tensor in tensors])
        return CommittedMedia(content.key, num_bytes, msgspec.msgpack.encode(prepared))

    def write_sources(self, contents: list[MediaContent], segment: str, key: MediaKey) -> CommittedMedia:
        """Writes the bytes of the items to the cache's segment."""
        _, num_bytes = write_segment(segment, key, [content.data for content in contents])
        return CommittedMedia(key, num_bytes, b"")

    def again(self, sources: HeldSources) -> list[MediaContent]:
        """Returns the items of a request whose bytes were kept. Raises InvalidMedia, WorkerLost."""
        contents = []
        for number, (item, data) in enumerate(zip(sources.items, read_sources(sources), strict=True)):
            source = MediaSource(number, item.kind, "", "messages")
            contents.append(
                MediaContent(source, data, MediaKey(item.digest, "input"), self.processor.size(source, data))
            )
        return contents

    def made(self, content: MediaContent, segment: str, description: bytes) -> MadeMedia:
        return MadeMedia(content.key.digest, segment, self._description.decode(description).tensors)

    def cached(self, content: MediaContent, segment: str, description: bytes) -> CachedMedia:
        """Returns what the prompt needs of an item that is in the cache."""
        prepared = self._description.decode(description)
        kind, digest = content.source.kind, content.key.digest
        return CachedMedia(kind, digest, segment, prepared.tensors, prepared.num_tokens, prepared.replacement)
