"""A real proxy and a real media cache, with fake workers: images and video up to the dispatch."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tandem.media_cache.media_client import MediaCacheClient
from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.media_cache import MediaCacheStatus
from tandem.protocol.sockets import new_context
from tests.support.cluster import children_of, command_line
from tests.support.fake_workers import FakeWorkers, Proxy, proxy_with_workers
from tests.support.vision_model import save_processor
from tests.support.waiting import wait_until

T = TypeVar("T")

LOAD_TIMEOUT_S = 300.0
"""Time to load the processor with torch and transformers on a slow machine."""


class MediaProxy:
    """url: of the proxy. Use as a context manager through `media_proxy`."""

    def __init__(self, folder: Path, proxy: Proxy, workers: FakeWorkers) -> None:
        self.folder = folder
        self.proxy = proxy
        self.workers = workers
        self.url = proxy.url

    def chat(self, *parts: dict[str, Any] | str, **fields: Any) -> httpx.Response:
        """Sends one message with these parts; strings are text."""
        content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=LOAD_TIMEOUT_S)

    def dispatched(self) -> StartPrefill:
        """Returns the last dispatched prompt."""
        return self.workers._started[self.workers.seen[-1]]

    def media_process(self) -> int:
        """Returns the process id of the proxy's media process, once there is one."""
        found: list[int] = []

        def is_there() -> bool:
            name = "tandem.proxy.reading.media_program"
            found[:] = [pid for pid in children_of(self.proxy.process.pid) if name in command_line(pid)]
            return len(found) == 1

        wait_until(is_there, 120.0)
        return found[0]

    def cache_status(self) -> MediaCacheStatus:
        return ask_cache(f"ipc://{self.folder}/cache.sock", MediaCacheClient.status)

    def clear_cache(self) -> None:
        ask_cache(f"ipc://{self.folder}/cache.sock", MediaCacheClient.clear)


def ask_cache(endpoint: str, call: Callable[[MediaCacheClient], Awaitable[T]]) -> T:
    """Makes one call to the proxy's media cache."""

    async def ask() -> T:
        context = new_context()
        client = MediaCacheClient(context, endpoint)
        try:
            return await call(client)
        finally:
            client.close()
            context.destroy(linger=0)

    return asyncio.run(ask())


@contextmanager
def media_proxy(folder: Path, capacity_bytes: int = 256 << 20, **config: Any) -> Iterator[MediaProxy]:
    save_processor(folder)
    file = folder / "media-cache.json"
    file.write_text(json.dumps({"endpoint": f"ipc://{folder}/cache.sock", "capacity_bytes": capacity_bytes}))
    cache = subprocess.Popen([sys.executable, "-W", "error", "-m", "tandem.media_cache", str(file)])
    options: dict[str, Any] = {
        "media_cache_endpoint": f"ipc://{folder}/cache.sock",
        "max_body_mib": 32,
        "request_timeout_s": LOAD_TIMEOUT_S,
        **config,
    }
    try:
        with proxy_with_workers(folder, {"max_model_len": 4096, "sticks": False}, **options) as (proxy, workers):
            yield MediaProxy(folder, proxy, workers)
    finally:
        cache.kill()
        cache.wait()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def video_part(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}
