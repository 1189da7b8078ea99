"""A media process and a media cache on the test's event loop, and the reader that works before and after them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from tandem.media_cache.media_cache_config import MediaCacheConfig
from tandem.media_cache.media_client import MediaCacheClient
from tandem.media_cache.media_segment import map_segment
from tandem.media_cache.server import MediaCacheServer
from tandem.protocol.messages.media import MediaItem, check_media, check_segment
from tandem.protocol.messages.media_cache import MediaCacheStatus, MediaKey
from tandem.protocol.messages.packed import unpack_token_ids
from tandem.protocol.sockets import new_context
from tandem.proxy.api.request_settings import RequestSettings
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.media.media_limits import MediaLimits
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyReader
from tandem.proxy.reading.media_messages import (
    FROM_PROCESS,
    FromMediaProcess,
    MediaJob,
    MediaJobDone,
    MediaJobFailed,
    MediaRemade,
    RemakeMedia,
)
from tandem.proxy.reading.media_process import MediaProcess, MediaReader
from tandem.proxy.text.prompt import RenderedPrompts
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.processes.sandbox import _ENCODER, Limits, result_decoder

LIMITS = ModelLimits(4096, 320, "m", 64)
T = TypeVar("T")
Answer = MediaJobDone | MediaRemade | MediaJobFailed


class OnThreads:
    """Calls a reader's methods on threads of the tests' process, each with a reader of its own."""

    def __init__(self, config: ProxyConfig) -> None:
        self.clients: list[str] = []
        """Of the calls."""
        self._readers = threading.local()
        self._threads = ThreadPoolExecutor(config.media_sandboxes + 1, initializer=self._load, initargs=(config,))

    def _load(self, config: ProxyConfig) -> None:
        self._readers.own = MediaReader(config)

    async def call(
        self,
        client: str,
        function: Callable[..., T],
        data: bytes | Path,
        arguments: tuple[object, ...],
        limits: Limits,
    ) -> T:
        self.clients.append(client)

        def call() -> T:
            return function(self._readers.own, data, *arguments)

        result = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        return result_decoder(function).decode(_ENCODER.encode(result))  # as from a sandbox


class MediaProcessOnLoop:
    """Reads requests with media as the processes beside a proxy do. limits: fields of MediaLimits."""

    def __init__(self, folder: Path, trusts_templates: bool = False, **limits: Any) -> None:
        self.folder = folder
        self._requests = RequestSettings(trust_request_chat_template=trusts_templates)
        (folder / "files").mkdir()
        defaults = {"max_media_items": 4, "max_pixels": 1_000_000, "max_bytes": 4 << 20}
        self.limits = MediaLimits(**{**defaults, **limits}, allowed_media_path=str(folder / "files"))
        self.loop = asyncio.new_event_loop()
        self.run(self._start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 240))

    async def _start(self) -> None:
        endpoint = f"ipc://{self.folder}/cache.sock"
        self._server = MediaCacheServer(MediaCacheConfig(endpoint, 64 << 20))
        self._serving = asyncio.create_task(self._server.run())
        self._context = new_context()
        self.client = MediaCacheClient(self._context, endpoint)
        self.done: asyncio.Queue[Answer] = asyncio.Queue()
        config = ProxyConfig(
            "proxy-0",
            "",
            str(self.folder),
            "m",
            media_cache_endpoint=endpoint,
            media=self.limits,
            media_sandboxes=2,
            requests=self._requests,
        )

        self.sandboxes = OnThreads(config)

        def on_message(message: FromMediaProcess) -> None:
            message = FROM_PROCESS.decode(FROM_PROCESS.encode(message))  # as the proxy gets it
            if isinstance(message, Answer):
                self.done.put_nowait(message)

        self.process = MediaProcess(config, MediaReader(config), self.sandboxes, on_message, os.getpid())  # type: ignore[arg-type]
        self.bodies = BodyReader.load(config)
        self._bodies_by_lease: dict[str, bytes] = {}

    def close(self) -> None:
        self.run(self._close())
        self.loop.close()

    async def _close(self) -> None:
        await self.process.close()
        self.client.close()
        self._server.stop()
        await self._serving
        self._context.destroy(linger=0)

    def job(self, *parts: dict[str, Any] | str, client: str = "", **fields: Any) -> MediaJob:
        content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        body = msgspec.json.encode({"messages": [{"role": "user", "content": content}], **fields})
        lease_id = self.client.new_id()
        path = str(self.folder / f"items-{lease_id}")
        found = self.bodies.find_media(body, "chat", "", path)
        self._bodies_by_lease[lease_id] = body
        return MediaJob(lease_id, found.items, path, found.cache_salt, LIMITS.max_model_len, client)

    def read_all(self, jobs: Sequence[MediaJob | RemakeMedia]) -> list[Answer]:
        """Reads all bodies concurrently; returns the results in order."""

        async def read() -> list[Answer]:
            for job in jobs:
                self.process.on_message(job)
            return [await self.done.get() for _ in jobs]

        by_lease = {done.lease_id: done for done in self.run(read())}
        return [by_lease[job.lease_id] for job in jobs]

    def prompt(
        self, *parts: dict[str, Any] | str, **fields: Any
    ) -> tuple[list[int], tuple[MediaItem, ...], list[dict[str, Any]]]:
        """(token ids, items, tensors by name of each)."""
        [done] = self.read_all([self.job(*parts, **fields)])
        try:
            return self.prompt_of(done)
        finally:
            self.client.release([done.lease_id])

    def prompt_of(self, done: Answer) -> tuple[list[int], tuple[MediaItem, ...], list[dict[str, Any]]]:
        if isinstance(done, MediaJobFailed):
            raise done.error
        assert isinstance(done, MediaJobDone)
        body = self._bodies_by_lease[done.lease_id]
        request = self.bodies.read_with_media(body, "chat", LIMITS, "", done.media, done.placeholders)
        assert isinstance(request.prompt, RenderedPrompts)
        [prompt] = request.prompt.prompts
        token_ids = unpack_token_ids(prompt.token_ids)
        check_media(prompt.media, len(token_ids))
        return token_ids, prompt.media, [tensors_of(item) for item in prompt.media]

    def refusal(self, *parts: dict[str, Any] | str, **fields: Any) -> str:
        with pytest.raises(InvalidRequest) as raised:
            self.prompt(*parts, **fields)
        return raised.value.message

    def status(self) -> MediaCacheStatus:
        return self.run(self.client.status())


def tensors_of(item: MediaItem) -> dict[str, NDArray[Any]]:
    mapped = map_segment(item.segment, MediaKey(item.digest, "input"))
    check_segment(item, len(mapped))
    return {
        t.name: np.frombuffer(mapped, t.dtype, int(np.prod(t.shape)), t.offset).reshape(t.shape) for t in item.tensors
    }
