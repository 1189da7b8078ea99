"""Small files do not make the media process use much memory or time."""

from __future__ import annotations

import io
import subprocess
import sys
import tracemalloc

import av
import msgspec
import numpy as np
import pytest

from tandem.proxy.media.decode import decode_image, decode_video, image_size, scaled_size, video_info
from tandem.proxy.media.media_limits import MediaLimits
from tandem.proxy.media.source import InvalidMedia, MediaSource
from tests.support.hostile_media import black_video, jpeg_with_scans, with_long_index
from tests.support.vision_model import clip, encoded, picture

LIMITS = MediaLimits()
IMAGE = MediaSource(0, "image", "data:", "messages[0].content[0]")
VIDEO = MediaSource(0, "video", "data:", "messages[0].content[0]")
_LIMITED = """
import os, resource, sys
from tandem.proxy.media.decode import video_info
from tandem.proxy.media.media_limits import MediaLimits
from tandem.proxy.media.source import InvalidMedia, MediaSource
from tandem.runtime.processes.sandbox import num_data_bytes
limit = num_data_bytes(os.getpid()) + (128 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    video_info(MediaSource(0, "video", "data:", "m"), sys.stdin.buffer.read(), MediaLimits())
except (InvalidMedia, MemoryError):
    pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_the_memory_of_a_video_does_not_grow_with_the_size_of_its_frames() -> None:
    """32 frames of 1920 x 1080 are 200 MB; before they were scaled while decoding, they were held twice."""
    video = black_video(32, 1920, 1080)
    assert len(video) < 20_000
    limits = msgspec.structs.replace(LIMITS, max_sampled_pixels=4 << 20)
    info = video_info(VIDEO, video, limits)
    tracemalloc.start()
    try:
        frames = decode_video(VIDEO, video, info, list(range(32)), limits)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert frames.shape[0] == 32
    assert 0.95 * (4 << 20) < frames.size / 3 <= 4 << 20
    assert peak < 1.2 * 3 * (4 << 20)


def test_ordinary_videos_are_not_scaled() -> None:
    """Up to 32 frames of 1920 x 1080 equal those that PyAV decodes."""
    assert scaled_size(1920, 1080, 32, LIMITS.max_sampled_pixels) == (1920, 1080)
    video = clip(12, 162, 90)
    with av.open(io.BytesIO(video)) as container:
        expected = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    info = video_info(VIDEO, video, LIMITS)
    np.testing.assert_array_equal(decode_video(VIDEO, video, info, list(range(12)), LIMITS), expected)


@pytest.mark.parametrize("size", [(3840, 2160), (4096, 4096), (100_000, 8), (16 << 20, 1), (1, 16 << 20)])
def test_large_frames_are_scaled_to_the_limit(size: tuple[int, int]) -> None:
    width, height = scaled_size(*size, 32, LIMITS.max_sampled_pixels)
    assert 1 <= width <= size[0] and 1 <= height <= size[1]
    assert 32 * width * height <= LIMITS.max_sampled_pixels
    if size == (3840, 2160):
        assert (width, height) == (1930, 1086)


def test_videos_beyond_4096_x_4096_are_refused_before_decoding() -> None:
    """A decoder keeps up to 16 frames, whose size the file chooses."""
    with pytest.raises(InvalidMedia, match="its frames have 7680 x 4320 pixels; the limit is 16777216"):
        video_info(VIDEO, black_video(1, 7680, 4320), LIMITS)


def test_a_video_whose_index_is_long_fails_at_the_memory_limit() -> None:
    """Without the limit, this file of 7 KB takes 350 MB before its first frame can be counted."""
    bomb = with_long_index(10_000_000)
    assert len(bomb) < 8000
    done = subprocess.run([sys.executable, "-c", _LIMITED], input=bomb, capture_output=True, timeout=120, check=True)
    assert int(done.stdout) < 128 * 1024  # KB


def test_counting_frames_has_a_deadline() -> None:
    limits = msgspec.structs.replace(LIMITS, decode_timeout_s=1e-9)
    with pytest.raises(InvalidMedia, match="counting its frames takes more than 1e-09 s"):
        video_info(VIDEO, clip(4), limits)


def test_a_jpeg_with_many_scans_is_refused_by_its_markers() -> None:
    for look in (image_size, decode_image):
        with pytest.raises(InvalidMedia, match="more than 100 scans"):
            look(IMAGE, jpeg_with_scans(100), LIMITS)
    for jpeg in (
        jpeg_with_scans(50),
        encoded(picture(300, 200), "JPEG"),
        encoded(picture(300, 200), "JPEG", progressive=True),
        encoded(picture(300, 200), "JPEG", exif=b"Exif\0\0" + b"\xff\xda" * 200) + b"\xff\xda" * 200,
    ):
        decode_image(IMAGE, jpeg, LIMITS)
    hidden = jpeg_with_scans(0)
    comment = b"\xff\xfe\x00\x04\xff\xd9"  # the marker of the end, where it is none
    with pytest.raises(InvalidMedia, match="more than 100 scans"):
        image_size(IMAGE, hidden[:2] + comment + jpeg_with_scans(100)[2:], LIMITS)
    with pytest.raises(InvalidMedia, match="more than 10000 segments"):
        image_size(IMAGE, hidden[:2] + comment * 10_000 + hidden[2:], LIMITS)


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_an_animation_costs_its_first_frame(kind: str) -> None:
    frames = [picture(200, 100, seed=seed) for seed in range(20)]
    animation = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    assert image_size(IMAGE, animation, LIMITS) == (200, 100)
    assert decode_image(IMAGE, animation, LIMITS).size == (200, 100)
