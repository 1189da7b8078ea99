"""The steps of reading a request with images and video that run on the media process's threads."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tandem.media_cache.media_segment import write_segment
from tandem.protocol.messages.media import MediaKind
from tandem.protocol.messages.media_cache import CommittedMedia, MediaKey
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.media.fetch import read_local
from tandem.proxy.media.media_lease import MadeMedia
from tandem.proxy.media.media_source_bytes import HeldSources, read_sources
from tandem.proxy.media.processor import MediaProcessor, MediaSize, PreparedMedia
from tandem.proxy.media.source import MediaSource
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyReader
from tandem.proxy.reading.media_messages import MediaJob
from tandem.proxy.text.model_text import ModelText
from tandem.proxy.text.prompt import CachedMedia, ChatPrompt, MediaPrompt, has_own_template
from tandem.runtime.errors import InvalidRequest


class MediaContent(msgspec.Struct, frozen=True):
    """An item with its bytes. size: known from its header."""

    source: MediaSource
    data: bytes
    key: MediaKey
    size: MediaSize


class MediaReader:
    """Loads the tokeniser and the processor. Raises ConfigError."""

    def __init__(self, config: ProxyConfig) -> None:
        text = ModelText(config.model, config.requests.generation_config)
        self._limits = config.media
        self._bodies = BodyReader(text, config)
        self.processor = MediaProcessor(text.folder, config.media, config.trust_remote_code)
        self._description: msgspec.msgpack.Decoder[PreparedMedia] = msgspec.msgpack.Decoder(PreparedMedia)

    def decode(self, job: MediaJob) -> GenerationRequest:
        """Raises InvalidRequest."""
        body = Path(job.path).read_bytes() if job.path else job.body
        request = self._bodies.decode(body, job.kind, job.cache_scope)
        if has_own_template(request.prompt):  # is rendered in a forked process, and this one has threads
            raise InvalidRequest(
                "chat_template cannot be combined with images or video; leave one of them out.", "chat_template"
            )
        return request

    def inspect(self, source: MediaSource, fetched: bytes | None, cache_salt: str) -> MediaContent:
        """Reads the item's header and hashes its bytes. fetched: None for data and file URLs. Raises InvalidMedia."""
        data = read_local(source, self._limits) if fetched is None else fetched
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
        """Returns the items of a request whose bytes were kept. Raises InvalidMedia, OSError."""
        contents = []
        for number, (item, data) in enumerate(zip(sources.items, read_sources(sources), strict=True)):
            source = MediaSource(number, item.kind, "", "messages")
            contents.append(
                MediaContent(source, data, MediaKey(item.digest, "input"), self.processor.size(source, data))
            )
        return contents

    def made(self, contents: list[MediaContent], cached: dict[MediaKey, tuple[str, bytes]]) -> list[MadeMedia]:
        made = []
        for content in contents:
            segment, description = cached[content.key]
            made.append(MadeMedia(content.key.digest, segment, self._description.decode(description).tensors))
        return made

    def render(
        self,
        request: GenerationRequest,
        limits: ModelLimits,
        contents: list[MediaContent],
        cached: dict[MediaKey, tuple[str, bytes]],
    ) -> GenerationRequest:
        """Renders and tokenises the chat. cached: segment and description of each item. Raises InvalidRequest."""
        assert isinstance(request.prompt, ChatPrompt)
        replacements: dict[MediaKind, list[str]] = {}
        media = []
        for content in contents:
            segment, description = cached[content.key]
            prepared = self._description.decode(description)
            kind = content.source.kind
            replacements.setdefault(kind, []).append(prepared.replacement)
            media.append(CachedMedia(kind, content.key.digest, segment, prepared.tensors, prepared.num_tokens))
        text = self.processor.expand(self._bodies.renderer.chat_text(request.prompt), replacements)
        prompt = MediaPrompt(text, media, self.processor.token_ids, request.prompt.add_special_tokens)
        return self._bodies.render(msgspec.structs.replace(request, prompt=prompt), limits)
