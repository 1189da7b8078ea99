"""JPEG images of realistic size and chat requests that contain them."""

from __future__ import annotations

import base64
import io

import msgspec
import numpy as np
from PIL import Image

from bench.support.servers import MODEL

WIDTH, HEIGHT = 644, 364


def jpeg(seed: int, width: int = WIDTH, height: int = HEIGHT) -> bytes:
    """Makes a JPEG with about as many bytes as a photograph of that size."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    pixels = np.clip(smooth + rng.integers(-12, 13, smooth.shape), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    return file.getvalue()


def chat_body(text: str, image: bytes, max_tokens: int = 1) -> bytes:
    """Returns the JSON body of a greedy, non-streamed chat request about one image."""
    url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return msgspec.json.encode(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
    )
