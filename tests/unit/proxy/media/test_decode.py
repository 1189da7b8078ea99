"""Images and videos that are too large, damaged or empty: refused before or while decoding."""

from __future__ import annotations

import io
import struct
import tempfile
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest
from PIL import Image

from tandem.proxy.media import decode
from tandem.proxy.media.decode import decode_image, decode_video, image_size, sampled, video_info
from tandem.proxy.media.media_limits import MediaLimits
from tandem.proxy.media.source import InvalidMedia, MediaSource
from tests.support.vision_model import clip, encoded, picture

LIMITS = MediaLimits(max_pixels=1_000_000, max_video_pixels=1_000_000)
IMAGE = MediaSource(2, "image", "data:", "messages[0].content[3]")
VIDEO = MediaSource(0, "video", "data:", "messages[0].content[0]")


def png_of(width: int, height: int) -> bytes:
    """A few bytes whose header declares an image of this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def without_frames() -> bytes:
    """An MP4 with an empty video stream."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4", options={"movflags": "empty_moov"}) as container:
        stream: Any = container.add_stream("mpeg4", rate=Fraction(8))
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        container.start_encoding()
    return file.getvalue()


def remuxed(video: bytes, sound_s: float = 0.0, **options: str) -> bytes:
    """The same frames, with this many seconds of silent sound."""
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:  # libav writes the index first in a second pass
        with av.open(io.BytesIO(video)) as whole, av.open(file.name, "w", format="mp4", options=options) as container:
            stream = container.add_stream_from_template(whole.streams.video[0])
            sound: Any = container.add_stream("aac", rate=16000) if sound_s else None
            for packet in whole.demux(video=0):
                if packet.dts is not None:
                    packet.stream = stream
                    container.mux(packet)
            if sound is not None:
                for number in range(int(sound_s * 16000) // 1024):
                    frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
                    frame.sample_rate, frame.pts = 16000, 1024 * number
                    container.mux(sound.encode(frame))
                container.mux(sound.encode())
        return Path(file.name).read_bytes()


def test_a_decompression_bomb_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    bomb = png_of(60_000, 60_000)
    for look in (image_size, decode_image):
        with pytest.raises(InvalidMedia, match=r"image 2 \(messages\[0\].content\[3\]\): it has 60000 x 60000 pixels"):
            look(IMAGE, bomb, LIMITS)


def test_a_videos_frames_are_counted_before_any_is_decoded() -> None:
    video = clip(20, 320, 320)  # two million pixels in all
    with pytest.raises(InvalidMedia, match=r"video 0 .*it has more than 9 frames of 320 x 320"):
        video_info(VIDEO, video, LIMITS)
    with pytest.raises(InvalidMedia, match="its frames have 320 x 320 pixels; the limit is 100000"):
        video_info(VIDEO, video, msgspec.structs.replace(LIMITS, max_video_frame_pixels=100_000))


def test_decoding_a_video_has_a_deadline() -> None:
    video = clip(4)
    info = video_info(VIDEO, video, LIMITS)
    with pytest.raises(InvalidMedia, match="it takes more than 1e-09 s to decode"):
        decode_video(VIDEO, video, info, [3], msgspec.structs.replace(LIMITS, decode_timeout_s=1e-9))


def test_a_video_without_frames() -> None:
    video = without_frames()
    with av.open(io.BytesIO(video)) as container:
        assert len(container.streams.video) == 1, "the whole file is a video"
    with pytest.raises(InvalidMedia, match=r"video 0 .*it has no frames"):
        video_info(VIDEO, video, LIMITS)


@pytest.mark.parametrize("kind", ["mp4", "faststart", "webm"])
def test_a_truncated_video_is_refused(kind: str) -> None:
    """An MP4 with its index at the end cannot be read at all; others can be read up to the cut."""
    video = clip(12, kind="webm") if kind == "webm" else clip(12)
    if kind == "faststart":
        video = remuxed(video, movflags="faststart")
    assert video_info(VIDEO, video, LIMITS).num_frames == 12
    for part in range(1, 9):
        cut = video[: len(video) * part // 10]
        with pytest.raises(InvalidMedia, match=r"video 0 .*(cut short|damaged|has no frames)"):
            decode_video(VIDEO, cut, video_info(VIDEO, cut, LIMITS), list(range(12)), LIMITS)


def test_a_video_with_longer_sound_is_complete() -> None:
    video = remuxed(clip(8), sound_s=3.0)
    assert video_info(VIDEO, video, LIMITS).num_frames == 8


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_truncated_image_is_refused(kind: str) -> None:
    image = encoded(picture(200, 150), kind)
    assert decode_image(IMAGE, image, LIMITS).size == (200, 150)
    for part in range(1, 10):
        with pytest.raises(InvalidMedia, match="image 2"):
            decode_image(IMAGE, image[: len(image) * part // 10], LIMITS)


def test_frames_at_equal_distances() -> None:
    assert sampled(5, 8) == [0, 1, 2, 3, 4]
    assert sampled(9, 3) == [0, 4, 8]


@pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 1), (3, 3), (64, 8)])
def test_a_video_is_decoded_by_no_more_threads_than_cores(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, num_threads: int
) -> None:
    """FFmpeg's own choice follows the cores of the host."""
    monkeypatch.setattr(decode, "num_cores", lambda: num_cores)
    with decode._opened_video(VIDEO, clip()) as container:
        assert container.streams.video[0].codec_context.thread_count == num_threads
