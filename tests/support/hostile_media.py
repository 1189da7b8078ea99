"""Small files that need much memory or time to decode."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
from PIL import Image

from tests.support.vision_model import clip


def black_video(num_frames: int, width: int, height: int) -> bytes:
    """An MP4 of black frames, a few KB for any size."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(24), options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        frame = av.VideoFrame(width, height, "yuv420p")
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        for number in range(num_frames):
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def with_long_index(num_frames: int) -> bytes:
    """An MP4 of 7 KB whose index has this many frames; libav needs about 35 bytes for each when it opens the file."""
    return _rewritten(clip(2), num_frames)


def _rewritten(data: bytes, num_frames: int) -> bytes:
    replaced = {
        b"stsz": struct.pack(">III", 0, 1, num_frames),  # all of one byte
        b"stsc": struct.pack(">IIIII", 0, 1, 1, num_frames, 1),  # all in one chunk
        b"stts": struct.pack(">IIII", 0, 1, num_frames, 512),
        b"stco": struct.pack(">III", 0, 1, 48),
        b"stss": None,
    }
    rewritten = b""
    for kind, content in _boxes(data):
        if kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
            content = _rewritten(content, num_frames)
        elif kind in replaced:
            if (replacement := replaced[kind]) is None:
                continue
            content = replacement
        rewritten += struct.pack(">I4s", len(content) + 8, kind) + content
    return rewritten


def _boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the kind and the content of each box of an MP4."""
    position = 0
    while position < len(data):
        size, kind = struct.unpack(">I4s", data[position : position + 8])
        yield kind, data[position + 8 : position + size]
        position += size


def jpeg_with_scans(num_scans: int, width: int = 64, height: int = 64) -> bytes:
    """A progressive JPEG with this many more scans, each of which is a pass over all pixels."""
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "JPEG", progressive=True)
    jpeg = file.getvalue()
    last_table = jpeg.rindex(b"\xff\xc4")
    return jpeg[:-2] + jpeg[last_table:-2] * num_scans + jpeg[-2:]
