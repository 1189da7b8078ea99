"""Decodes images (Pillow) and video (PyAV). Items that are too large are refused before decoding.

MemoryError is never turned into InvalidMedia: another request may have used the memory.

A decoded image is turned into what a viewer shows: upright, 8 bits, sRGB, on white. transformers' processors convert to
RGB only, which clips grey levels of 16 bits and takes the numbers of any colour space for sRGB.
"""

from __future__ import annotations

import io
import math
import re
import time
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import av
import av.error
import msgspec
import numpy as np
from av.video.reformatter import Colorspace
from numpy.typing import NDArray
from PIL import Image, ImageCms, UnidentifiedImageError

from tandem.proxy.media.media_limits import MediaLimits
from tandem.proxy.media.source import MediaSource
from tandem.runtime.cores import num_cores
from tandem.runtime.errors import client_reason

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
VIDEO_FORMATS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
_MIN_COMPLETE_SHARE = 0.9
"""A video is damaged if a smaller share of its frames or of its declared duration can be decoded."""
_MAX_CODEC_THREADS = 8
"""Of one video. The media process has a sandbox for every 8 cores (`deploy.cluster_config`)."""
_UNSPECIFIED_COLOURS = 2
_MIN_HD_HEIGHT = 720
_FIRST_TURNED = 5
"""From this EXIF orientation on, width and height change places."""
_MAX_JPEG_SCANS = 100
"""A progressive JPEG has about ten. Each is a pass over all pixels (10 ms at 33 million), and may be 75 bytes long."""
_MAX_JPEG_SEGMENTS = 10_000
_JPEG_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")  # without restart markers, which are inside of scans
_JPEG_SCAN, _JPEG_END = b"\xda", b"\xd9"

Image.MAX_IMAGE_PIXELS = None  # MediaLimits.max_pixels is checked instead


class VideoInfo(msgspec.Struct, frozen=True):
    """Properties of a video."""

    num_frames: int
    """Number of frames, counted and not as declared."""
    fps: float
    """Mean frames per second."""
    width: int
    """Width as shown, before rotation."""
    height: int
    """Height as shown, before rotation."""
    coded_size: tuple[int, int]
    """(width, height) of the frames in the file, whose pixels may not be square."""

    @property
    def duration_s(self) -> float:
        return self.num_frames / self.fps


def image_size(source: MediaSource, data: bytes, limits: MediaLimits) -> tuple[int, int]:
    """Returns (width, height) from the header. Raises InvalidMedia if it is no image or has too many pixels."""
    with _opened_image(source, data, limits) as image:
        width, height = image.size
        # PNG may have its orientation behind the pixels, which are not read here.
        is_turned = image.format != "PNG" and orientation(image) >= _FIRST_TURNED
        return (height, width) if is_turned else (width, height)


def decode_image(source: MediaSource, data: bytes, limits: MediaLimits) -> Image.Image:
    """Returns the first frame as a viewer shows it, as sRGB on white. Raises InvalidMedia."""
    with _opened_image(source, data, limits) as image:
        image.load()
        return as_shown(image)


@contextmanager
def _opened_image(source: MediaSource, data: bytes, limits: MediaLimits) -> Iterator[Image.Image]:
    """Yields the image with only its header read. Raises InvalidMedia, also for Pillow's errors in the `with`."""
    if not data:
        raise source.refused("it is empty")
    if data.startswith(b"\xff\xd8"):
        _check_jpeg(source, data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual metadata
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
                _checked_size(source, image.size, limits.max_pixels)
                yield image
    except UnidentifiedImageError as error:
        raise source.refused(f"it is not an image of a supported type ({', '.join(IMAGE_FORMATS)})") from error
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise source.refused(f"it is damaged or cut short: {client_reason(error)[:160]}") from error


def _check_jpeg(source: MediaSource, data: bytes) -> None:
    """Raises InvalidMedia for a JPEG with too many scans or segments. Their number is in no header."""
    position, num_scans = 2, 0
    for _ in range(_MAX_JPEG_SEGMENTS):
        marker = _JPEG_MARKER.search(data, position)
        if marker is None or marker[1] == _JPEG_END:
            return
        num_scans += marker[1] == _JPEG_SCAN
        if num_scans > _MAX_JPEG_SCANS:
            raise source.refused(f"it has more than {_MAX_JPEG_SCANS} scans; save it again as a plain JPEG")
        position = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    raise source.refused(f"it has more than {_MAX_JPEG_SEGMENTS} segments; save it again as a plain JPEG")


def _checked_size(source: MediaSource, size: tuple[int, int], max_pixels: int) -> tuple[int, int]:
    width, height = size
    if width < 1 or height < 1:
        raise source.refused("it has no pixels")
    if width * height > max_pixels:
        what = "it has" if source.kind == "image" else "its frames have"
        raise source.refused(f"{what} {width} x {height} pixels; the limit is {max_pixels}")
    return width, height


def video_info(source: MediaSource, data: bytes, limits: MediaLimits) -> VideoInfo:
    """Counts the frames without decoding them. Raises InvalidMedia."""
    deadline = time.monotonic() + limits.decode_timeout_s
    with _opened_video(source, data) as container:
        stream = container.streams.video[0]
        size = stream.codec_context.width, stream.codec_context.height
        if size == (0, 0):  # unknown without a frame
            raise source.refused("it has no frames")
        width, height = _checked_size(source, size, limits.max_video_frame_pixels)
        max_frames = limits.max_video_pixels // (width * height)
        shape = stream.sample_aspect_ratio  # of a pixel
        rate = stream.average_rate or stream.guessed_rate
        fps = float(rate) if rate else 24.0
        num_frames, end_s = 0, 0.0
        for packet in container.demux():  # including sound, which may be longer than the video
            if packet.pts is not None:
                end_s = max(end_s, float(packet.pts * packet.time_base) + 1 / fps)
            num_frames += packet.size > 0 and packet.stream is stream
            if num_frames > max_frames:
                raise source.refused(
                    f"it has more than {max_frames} frames of {width} x {height}; "
                    f"the limit is {limits.max_video_pixels} pixels"
                )
            if time.monotonic() > deadline:
                raise source.refused(f"counting its frames takes more than {limits.decode_timeout_s:g} s")
        if not num_frames:
            raise source.refused("it has no frames")
        declared_s = (container.duration or 0) / av.time_base
        if end_s - (container.start_time or 0) / av.time_base < _MIN_COMPLETE_SHARE * declared_s:
            raise source.refused(
                f"it is cut short: its declared duration is {declared_s:.3g} s, but it ends after {end_s:.3g} s"
            )
        return VideoInfo(num_frames, fps, *_square(width, height, shape), (width, height))


def decode_video(
    source: MediaSource, data: bytes, info: VideoInfo, indices: Sequence[int], limits: MediaLimits
) -> NDArray[np.uint8]:
    """Returns the frames of these ascending indices: uint8 [num_frames, height, width, 3]. Raises InvalidMedia.

    They are shown as a player does: upright, with square pixels, and with the colours that the file declares.

    Frames with more than `max_sampled_pixels` together are scaled down while decoding, so that memory does not grow
    with the size of the video. The processor scales them again; its output then differs slightly from that for full
    frames.
    """
    width, height = scaled_size(info.width, info.height, len(indices), limits.max_sampled_pixels)
    frames: NDArray[np.uint8] | None = None
    number, num_found, num_turns = -1, 0, 0
    deadline = time.monotonic() + limits.decode_timeout_s
    with _opened_video(source, data) as container:
        for number, frame in enumerate(container.decode(container.streams.video[0])):
            if time.monotonic() > deadline:
                raise source.refused(f"it takes more than {limits.decode_timeout_s:g} s to decode")
            if (frame.width, frame.height) != info.coded_size:
                raise source.refused("its frames have different sizes")
            if number == indices[num_found]:
                pixels = frame.to_ndarray(format="rgb24", width=width, height=height, src_colorspace=_colours_of(frame))
                if frames is None:
                    num_turns = round(frame.rotation / 90) % 4
                    frames = np.empty((len(indices), *np.rot90(pixels, num_turns).shape), np.uint8)
                num_same = bisect_right(indices, number) - num_found
                frames[num_found : num_found + num_same] = np.rot90(pixels, num_turns)
                num_found += num_same
                if num_found == len(indices):
                    break
    if frames is None:
        raise source.refused("none of its frames can be decoded")
    if number + 1 < _MIN_COMPLETE_SHARE * info.num_frames and num_found < len(indices):
        raise source.refused(
            f"it is damaged or cut short: only {number + 1} of its {info.num_frames} frames can be decoded"
        )
    # Some packets contain no frame: repeats the last frame, so that the number of frames is as requested.
    frames[num_found:] = frames[num_found - 1]
    return frames


def _square(width: int, height: int, shape: Fraction | None) -> tuple[int, int]:
    """Returns the size with square pixels. It is never larger, however wide or narrow the declared ones are.

    shape: width of a pixel divided by its height; None or 0 if unknown.
    """
    if not shape or shape == 1:
        return width, height
    if shape > 1:
        return width, max(1, round(height / shape))
    return max(1, round(width * shape)), height


def _colours_of(frame: Any) -> Colorspace | None:
    """Returns the colour space of a frame that declares none: players take BT.709 for large ones. None: as declared."""
    is_unknown = frame.colorspace == _UNSPECIFIED_COLOURS and frame.height >= _MIN_HD_HEIGHT
    return Colorspace.ITU709 if is_unknown else None


def scaled_size(width: int, height: int, num_frames: int, max_pixels: int) -> tuple[int, int]:
    """Returns (width, height) in the same proportions, so that this many frames have at most `max_pixels` together."""
    max_frame_pixels = max_pixels // num_frames
    scale = min(1.0, math.sqrt(max_frame_pixels / (width * height)))
    # At least one pixel each way, even where the proportions then change.
    width = max(1, min(int(width * scale), max_frame_pixels))
    return width, max(1, min(int(height * scale), max_frame_pixels // width))


def sampled(num_frames: int, max_frames: int) -> list[int]:
    """Returns up to `max_frames` equidistant frame indices, including the first and the last."""
    if num_frames <= max_frames:
        return list(range(num_frames))
    return [int(index) for index in np.linspace(0, num_frames - 1, max_frames).astype(int)]


@contextmanager
def _opened_video(source: MediaSource, data: bytes) -> Iterator[Any]:
    """Yields PyAV's container. Raises InvalidMedia, also for errors of PyAV in the body of the `with`."""
    if not data:
        raise source.refused("it is empty")
    try:
        # Only these demuxers: others read playlists, which name files and URLs.
        options = {"protocol_whitelist": "", "format_whitelist": ",".join(VIDEO_FORMATS)}
        with av.open(io.BytesIO(data), options=options) as container:
            if container.format.name not in VIDEO_FORMATS:
                raise source.refused("it is not an MP4 or WebM video")
            if not container.streams.video:
                raise source.refused("it has no video stream")
            # FFmpeg would start a thread for each core of the host.
            container.streams.video[0].codec_context.thread_count = min(_MAX_CODEC_THREADS, num_cores())
            yield container
    except MemoryError:  # PyAV's own is an FFmpegError too
        raise
    except (av.error.FFmpegError, ValueError, OverflowError) as error:
        raise source.refused(
            f"it is not an MP4 or WebM video, or it is damaged: {client_reason(error)[:160]}"
        ) from error


_ORIENTATION = 0x0112
"""EXIF's tag."""
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_MAX_PROFILE_BYTES = 4 << 20
"""Size of a colour profile; those of printers have up to 3 MB. Larger ones are ignored."""
_DISPLAY_GAMMA = 2.2
_MIN_GAMMA_CHANGE = 0.05


def orientation(image: Image.Image) -> int:
    """Returns EXIF's orientation, 1 (upright) if there is none or it cannot be read."""
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception:  # Pillow raises many types for damaged EXIF; viewers ignore it
        return 1
    return found if found in _UPRIGHT else 1


def as_shown(image: Image.Image) -> Image.Image:
    """image: decoded. Returns RGB."""
    info, turn = image.info, _UPRIGHT.get(orientation(image))
    if image.mode.startswith("I"):
        image = _with_8_bits(image)
    if turn is not None:
        image = image.transpose(turn)
    if not image.has_transparency_data:
        return _as_srgb(image, info)
    layers = image.convert("RGBA")
    shown = Image.new("RGB", layers.size, (255, 255, 255))
    shown.paste(_as_srgb(layers.convert("RGB"), info), mask=layers.getchannel("A"))
    return shown


def _with_8_bits(image: Image.Image) -> Image.Image:
    """Returns an image of 16-bit grey levels with their upper 8 bits, as Pillow does for 16-bit colours."""
    levels = np.asarray(image)
    grey = Image.fromarray((levels >> 8).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray(np.where(levels == transparent, 0, 255).astype(np.uint8)))
    return grey


def _as_srgb(image: Image.Image, info: dict[Any, Any]) -> Image.Image:
    """Converts to RGB by the colour profile or the gamma that the file has. info: Pillow's, of the file."""
    profile = info.get("icc_profile")
    if not profile or len(profile) > _MAX_PROFILE_BYTES:
        return _with_gamma(image.convert("RGB"), info)
    if image.mode not in ("RGB", "L", "CMYK"):
        image = image.convert("RGB")
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if image.mode == "RGB" and "sRGB" in ImageCms.getProfileDescription(source):
            return image
        shown = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):  # damaged, or of another kind of image
        return image.convert("RGB")
    return image.convert("RGB") if shown is None else shown


def _with_gamma(image: Image.Image, info: dict[Any, Any]) -> Image.Image:
    """Applies a PNG's gamma, which linear images have. The chunk sRGB goes before it."""
    gamma = info.get("gamma")
    if not isinstance(gamma, float) or gamma <= 0 or "srgb" in info:
        return image
    exponent = 1 / (_DISPLAY_GAMMA * gamma)
    if abs(exponent - 1) < _MIN_GAMMA_CHANGE:
        return image
    return image.point([round(255 * (level / 255) ** exponent) for level in range(256)] * 3)
