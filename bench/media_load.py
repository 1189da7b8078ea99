"""What the media benchmarks share: a cluster of a vision-language model, bodies with images and video, requests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import httpx
import msgspec
import numpy as np
from PIL import Image

from bench.ports import free_port

MODEL = "m"
WIDTH, HEIGHT = 644, 364
_START_TIMEOUT_S = 300.0


class Answer(msgspec.Struct, frozen=True):
    """status: of HTTP, or 0 where there was none, for the reason in `error`. Times in seconds from sending."""

    status: int
    first_byte_s: float | None
    done_s: float
    error: str = ""


def jpeg(number: int, width: int = WIDTH, height: int = HEIGHT) -> bytes:
    """About as many bytes as a photograph of that size has."""
    return _encoded(_pixels(number, width, height))


def clip(number: int, num_frames: int = 8, width: int = 224, height: int = 224) -> bytes:
    """An MP4 at 8 frames a second."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=Fraction(8))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in range(num_frames):
            picture: Any = av.VideoFrame.from_image(_pixels(100 * number + frame, width, height))  # type: ignore[no-untyped-call]
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return file.getvalue()


def _pixels(number: int, width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    return Image.fromarray(np.clip(smooth + rng.integers(-12, 13, smooth.shape), 0, 255).astype(np.uint8))


def _encoded(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return file.getvalue()


def chat_body(text: str, image: bytes | None = None, video: bytes | None = None, max_tokens: int = 8) -> bytes:
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if image is not None:
        url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    if video is not None:
        url = f"data:video/mp4;base64,{base64.b64encode(video).decode()}"
        content.insert(0, {"type": "video_url", "video_url": {"url": url}})
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    return msgspec.json.encode(body)


def text_of(rng: random.Random, num_words: int = 60) -> str:
    return " ".join(str(rng.randrange(1000)) for _ in range(num_words))


async def send(client: httpx.AsyncClient, body: bytes, timeout_s: float) -> Answer:
    """One streamed chat. timeout_s: for the first byte of its answer."""
    begun = time.perf_counter()
    first_s: float | None = None
    try:
        async with client.stream(
            "POST",
            "/v1/chat/completions",
            content=body,
            headers={"content-type": "application/json"},
            timeout=httpx.Timeout(timeout_s, read=timeout_s, pool=None),
        ) as response:
            async for piece in response.aiter_bytes():
                if piece and first_s is None:
                    first_s = time.perf_counter() - begun
                last = piece
        error = "" if response.status_code != 200 or b"[DONE]" in last else "the stream ended with an error"
        return Answer(response.status_code, first_s, time.perf_counter() - begun, error)
    except httpx.HTTPError as error:
        return Answer(0, first_s, time.perf_counter() - begun, type(error).__name__)


@contextlib.contextmanager
def cluster(model: Path, *options: str) -> Iterator[str]:
    """The URL of a fresh cluster that has seen one image."""
    port = free_port()
    command = [
        sys.executable, "-m", "tandem.deploy.cli", "up", "--port", str(port), "--model", str(model),
        "--served-model-name", MODEL, *options,
    ]  # fmt: skip
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _serves(url):
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the cluster did not start")
            time.sleep(0.3)
        yield url
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(30)


def _serves(url: str) -> bool:
    try:
        if httpx.get(f"{url}/health", timeout=5).status_code != 200:
            return False
        body = json.loads(chat_body("warm", image=jpeg(0, 56, 56), max_tokens=1)) | {"stream": False}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=_START_TIMEOUT_S)
    except httpx.TransportError:
        return False
    if answer.status_code == 503:  # its processor is not loaded yet, and takes longer than first tokens may
        return False
    if answer.status_code != 200:
        raise SystemExit(f"the model does not take images: {answer.text[:300]}")
    return True


async def send_at_most(url: str, bodies: list[bytes], at_once: int, timeout_s: float) -> tuple[list[Answer], float]:
    """All of them, so many at a time, in order; and the seconds that it took."""
    places = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=at_once)
    async with httpx.AsyncClient(base_url=url, limits=limits) as client:

        async def one(body: bytes) -> Answer:
            async with places:
                return await send(client, body, timeout_s)

        begun = time.perf_counter()
        answers = await asyncio.gather(*(one(body) for body in bodies))
        return list(answers), time.perf_counter() - begun
