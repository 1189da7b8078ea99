"""An image that ends media processes is refused, whatever its client sends beside it. Other clients lose nothing."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL.PngImagePlugin import PngInfo

from tandem.media_cache.media_cache_config import MediaCacheConfig
from tandem.media_cache.media_client import MediaCacheClient
from tandem.media_cache.server import MediaCacheServer
from tandem.protocol.sockets import new_context
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading import media_pool
from tandem.proxy.reading.body_reader import BodyReader
from tandem.proxy.reading.media_pool import MediaPool
from tandem.proxy.reading.reader_pool import ReaderPool
from tandem.runtime.errors import InvalidRequest, TandemError
from tandem.runtime.tasks import start
from tests.support.media_proxy import data_url, image_part
from tests.support.vision_model import picture, save_processor
from tests.unit.proxy.reading.test_media_pool import LIMITS


class Readers(ReaderPool):
    """Reads bodies in the tests' process."""

    def __init__(self, config: ProxyConfig) -> None:
        self._reader = BodyReader.load(config)

    async def run(self, method: Any, data: Any, *arguments: Any, client: str = "") -> Any:
        return method(self._reader, data, *arguments)


def body(number: int, marker: str = "") -> bytes:
    """Returns a chat with a small image. marker: is in the image's bytes."""
    marks, file = PngInfo(), io.BytesIO()
    marks.add_text("comment", marker)
    picture(60, 50, seed=number).save(file, "PNG", pnginfo=marks)
    return json.dumps(
        {"messages": [{"role": "user", "content": [image_part(data_url(file.getvalue()))]}], "max_tokens": 1}
    ).encode()


@pytest.mark.parametrize("threads", [1, 3])
def test_an_image_that_ends_processes_beside_slow_ones(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_pool, "_MODULE", "tests.support.killing_media")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    save_processor(tmp_path)
    endpoint = f"ipc://{tmp_path}/cache.sock"
    config = ProxyConfig("proxy-0", "", str(tmp_path), "m", media_cache_endpoint=endpoint, media_sandboxes=threads)

    async def test() -> None:
        server = MediaCacheServer(MediaCacheConfig(endpoint, 64 << 20))
        serving = asyncio.create_task(server.run())
        context = new_context()
        pool = MediaPool(config, MediaCacheClient(context, endpoint), Readers(config))

        async def read(number: int, marker: str, client: str) -> str:
            try:
                (await pool.read("chat", body(number, marker), LIMITS, client)).release_media()
            except TandemError as error:
                return type(error).__name__
            return "read"

        try:
            assert await read(0, "", "tenant") == "read"
            attacks = [start(read(10 + i, "SLOW", "attacker")) for i in range(6)]
            attacks += [start(read(20 + i, "SLOW KILL", "attacker")) for i in range(2)]
            attacks += [start(read(25, "HANG", "attacker"))]
            process = pool._process
            tenant = [await read(30 + i, "", "tenant") for i in range(10)]
            ended = await asyncio.gather(*attacks)
        finally:
            pool.close()
            context.destroy(linger=0)
            server.stop()
            await serving
        assert ended == ["read"] * 6 + [InvalidRequest.__name__] * 3
        assert pool._process is process, "the images end sandboxes, not the process with all requests"
        assert tenant == ["read"] * 10

    asyncio.run(asyncio.wait_for(test(), 240))
