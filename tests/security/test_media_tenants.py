"""One client's requests with images are served while another's would hold the process that makes tensors of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

from tests.integration.test_media_requests import media_process
from tests.security.second_tenant import private_bytes
from tests.support.hostile_grammars import CONJUNCTIONS
from tests.support.media_proxy import MediaProxy, data_url, image_part, media_proxy, video_part
from tests.support.vision_model import clip, encoded, picture

pytestmark = [pytest.mark.extended, pytest.mark.alone]

MAX_LATENCY_S = 15.0
"""Of a small image, on a machine that does other work. Beside a heavy schema it was 60 s, and then an error."""
MAX_GROWN_BYTES = 256 << 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MediaProxy]:
    with media_proxy(tmp_path_factory.mktemp("tenants")) as running:
        assert running.chat(small(0)).status_code == 200, "the media process is loaded"
        yield running


def small(number: int) -> dict[str, Any]:
    return image_part(data_url(encoded(picture(60, 60, seed=number))))


def body_of(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1, **fields}


class Tenant:
    """Sends small images from an address of its own until it is stopped. latencies_s: of each."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._stopped = threading.Event()
        self.latencies_s: list[float] = []
        self.errors: list[str] = []

    def run(self) -> None:
        transport = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(transport=transport, timeout=120) as client:
            number = 1000
            while not self._stopped.wait(0.1):
                number += 1
                began = time.monotonic()
                answer = client.post(self._url, json=body_of(small(number)))
                self.latencies_s.append(time.monotonic() - began)
                if answer.status_code != 200:
                    self.errors.append(answer.text)

    def stop(self) -> None:
        self._stopped.set()


@contextmanager
def served_beside(served: MediaProxy) -> Iterator[None]:
    """Asserts that another client's images are served meanwhile, by a media process that does not grow."""
    pid = media_process(served)
    before = private_bytes(pid)
    tenant = Tenant(served.url)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(tenant.run)
        try:
            yield
            time.sleep(1)
        finally:
            tenant.stop()
        running.result()
    assert not tenant.errors and tenant.latencies_s
    assert max(tenant.latencies_s) < MAX_LATENCY_S
    assert media_process(served) == pid and private_bytes(pid) - before < MAX_GROWN_BYTES


@pytest.mark.parametrize("stays", [True, False])
def test_a_heavy_schema_beside_a_small_image(served: MediaProxy, stays: bool) -> None:
    def send(number: int) -> None:
        patterns = [{"pattern": f"{pattern}|{number}"} for pattern in CONJUNCTIONS["contains"]]
        schema = {"type": "object", "properties": {"a": {"type": "string", "allOf": patterns}}}
        text_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body = body_of(small(number), response_format=text_format)
        with suppress(httpx.TimeoutException):
            answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=120 if stays else 0.7)
            assert answer.status_code == 400 and "response_format" in answer.text and "Send fewer" in answer.text

    with served_beside(served), ThreadPoolExecutor(8) as threads:
        list(threads.map(send, range(8)))


def test_slow_videos_and_large_images(served: MediaProxy) -> None:
    parts = [video_part(data_url(clip(60, 1280, 720), "video/mp4")), image_part(data_url(encoded(picture(4000, 3000))))]

    def send(number: int) -> None:
        body = body_of(parts[number % 2], cache_salt=str(number))
        with suppress(httpx.TimeoutException):
            httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=[60, 0.5][number // 4 % 2])

    with served_beside(served), ThreadPoolExecutor(8) as threads:
        list(threads.map(send, range(8)))
