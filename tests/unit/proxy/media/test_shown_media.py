"""Pictures and films look as in a viewer: depth, colours, orientation and the shape of pixels."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageCms

from tandem.proxy.media.decode import decode_image, decode_video, image_size, video_info
from tandem.proxy.media.media_limits import MediaLimits
from tandem.proxy.media.source import MediaSource

LIMITS = MediaLimits()
IMAGE = MediaSource(0, "image", "data:", "m")
VIDEO = MediaSource(0, "video", "data:", "m")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(rows: NDArray[Any], depth: int, colour: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """rows: bytes of the rows, [height, bytes]. colour: PNG's type; 0 is grey, 2 RGB, 3 palette, 4 grey with alpha."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    width = rows.shape[1] * 8 // (depth * channels)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, rows.shape[0], depth, colour, 0, 0, 0))
    pixels = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    parts = [chunk(kind, data) for kind, data in chunks]
    return b"".join([b"\x89PNG\r\n\x1a\n", head, *parts, chunk(b"IDAT", pixels), chunk(b"IEND", b"")])


def deep(*levels: int) -> NDArray[Any]:
    return np.array([levels], ">u2").view(np.uint8)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def shown(data: bytes) -> list[list[tuple[int, ...]]]:
    pixels = np.asarray(decode_image(IMAGE, data, LIMITS))
    assert pixels.shape[:2] == image_size(IMAGE, data, LIMITS)[::-1] and pixels.shape[2] == 3
    return [[tuple(map(int, pixel)) for pixel in row] for row in pixels]


def grey(*levels: int) -> list[list[tuple[int, ...]]]:
    return [[(level,) * 3 for level in levels]]


WHITE, RED, BLUE = (255, 255, 255), (200, 0, 0), (0, 0, 200)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (png(deep(0, 0x40FF, 0x8000, 0xFFFF), 16, 0), grey(0, 0x40, 0x80, 0xFF)),
        (png(deep(0, 0x8000, 0xFFFF), 16, 0, (b"tRNS", b"\x80\x00")), grey(0, 0xFF, 0xFF)),
        (png(deep(0xFF00, 0x8000, 0), 16, 2), [[(0xFF, 0x80, 0)]]),
        (png(deep(0x8000, 0xFFFF, 0, 0), 16, 4), grey(0x80, 0xFF)),
        (png(np.array([[0b10100000]], np.uint8), 1, 0), grey(255, 0, 255, 0, 0, 0, 0, 0)),
        (png(np.array([[0b00011011]], np.uint8), 2, 0), grey(0, 85, 170, 255)),
        (
            png(
                np.array([[0, 1, 2]], np.uint8),
                8,
                3,
                (b"PLTE", bytes([9, 9, 9, *RED, *BLUE])),
                (b"tRNS", b"\0"),
            ),
            [[WHITE, RED, BLUE]],
        ),
        (png(np.array([[10, 10, 10, 0]], np.uint8), 8, 6), [[WHITE]]),
    ],
    ids=["grey 16", "grey 16, one transparent", "rgb 16", "grey and alpha 16", "1 bit", "2 bits", "palette", "alpha"],
)
def test_all_depths_keep_their_levels(data: bytes, expected: list[list[tuple[int, ...]]]) -> None:
    assert shown(data) == expected


def test_linear_pictures_are_as_bright_as_in_a_browser() -> None:
    linear = (b"gAMA", struct.pack(">I", 100_000))
    level = np.array([[64]], np.uint8)
    assert shown(png(level, 8, 0, linear)) == grey(round(255 * (64 / 255) ** (1 / 2.2)))
    assert shown(png(level, 8, 0, (b"gAMA", struct.pack(">I", 45_455)))) == grey(64)
    assert shown(png(level, 8, 0, linear, (b"sRGB", b"\0"))) == grey(64)


def wide_profile() -> bytes:
    """A profile of RGB whose red and green have changed places, so that its use shows."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    red, green = profile.index(b"rXYZ"), profile.index(b"gXYZ")
    profile[red : red + 4], profile[green : green + 4] = b"gXYZ", b"rXYZ"
    return bytes(profile).replace("sRGB".encode("utf-16-be"), "test".encode("utf-16-be"))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_colours_follow_the_profile_of_the_file(kind: str) -> None:
    image = Image.new("RGB", (16, 16), (250, 10, 10))
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    plain = shown(saved(image, kind, **options))[8][8]
    profiled = shown(saved(image, kind, icc_profile=wide_profile(), **options))[8][8]
    assert plain[0] > 240 and plain[1] < 20
    assert profiled[0] < 20 and profiled[1] > 240, "the profile's red is green"
    damaged = shown(saved(image, kind, icc_profile=b"no profile" * 20, **options))[8][8]
    assert damaged == plain


def test_colours_of_printers_and_of_television_become_rgb() -> None:
    cmyk = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    assert np.allclose(shown(saved(cmyk, "JPEG"))[8][8], (255, 0, 0), atol=3)
    assert np.allclose(shown(saved(Image.new("L", (16, 16), 77), "JPEG"))[8][8], (77,) * 3, atol=1)


TURNED: dict[int, Callable[[NDArray[Any]], NDArray[Any]]] = {
    1: lambda p: p,
    2: np.fliplr,
    3: lambda p: np.rot90(p, 2),
    4: np.flipud,
    5: lambda p: p.transpose(1, 0, 2),
    6: np.rot90,
    7: lambda p: np.rot90(p, 2).transpose(1, 0, 2),
    8: lambda p: np.rot90(p, 3),
}
"""How a camera stores an upright picture, by EXIF's orientation."""


@pytest.mark.parametrize("turn", TURNED)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_pictures_stand_upright(kind: str, turn: int) -> None:
    pixels = np.zeros((32, 16, 3), np.uint8)
    pixels[:8, :8] = 255  # the upper left corner
    exif = Image.Exif()
    exif[0x0112] = turn
    data = saved(Image.fromarray(np.ascontiguousarray(TURNED[turn](pixels))), kind, exif=exif)
    upright = np.asarray(decode_image(IMAGE, data, LIMITS))
    assert upright.shape == (32, 16, 3)
    assert upright[4, 4].mean() > 200 and upright[28, 12].mean() < 50 and upright[4, 12].mean() < 50
    if kind != "PNG":
        assert image_size(IMAGE, data, LIMITS) == (16, 32)


def test_damaged_metadata_is_ignored() -> None:
    image = Image.new("RGB", (16, 16), (9, 9, 9))
    assert decode_image(IMAGE, saved(image, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"), LIMITS).size == (16, 16)


def film(
    pixels: NDArray[np.uint8],
    colours: int | None = None,
    levels: int = 1,
    shape: Fraction | None = None,
    turn: int = 0,
) -> bytes:
    """A film of two equal frames. colours, levels: of FFmpeg, declared if given. turn: degrees, counter-clockwise."""
    file = io.BytesIO()
    height, width = pixels.shape[:2]
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(8))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        if shape is not None:
            stream.codec_context.sample_aspect_ratio = shape
        if colours is not None:
            stream.codec_context.colorspace, stream.codec_context.color_range = colours, levels
        if turn:
            stream.set_display_rotation(turn)
        space = colours or (1 if height >= 720 else 5)
        for _ in range(2):
            frame: Any = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=space, dst_color_range=levels)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def played(data: bytes, limits: MediaLimits = LIMITS) -> NDArray[np.uint8]:
    frames = decode_video(VIDEO, data, video_info(VIDEO, data, limits), [0, 1], limits)
    first: NDArray[np.uint8] = frames[0]
    return first


ORANGE = (200, 80, 30)


def plain(height: int, width: int) -> NDArray[np.uint8]:
    return np.full((height, width, 3), ORANGE, np.uint8)


@pytest.mark.parametrize("height", [48, 720])
@pytest.mark.parametrize("colours", [(1, 1), (1, 2), (5, 1), (5, 2), (9, 1), None], ids=str)
def test_a_film_has_the_colours_that_it_declares(colours: tuple[int, int] | None, height: int) -> None:
    """Without a declaration, those of players: BT.709 for large pictures and BT.601 for small ones."""
    found = played(film(plain(height, 64), *(colours or ())))
    assert np.abs(found[height // 2, 32].astype(int) - ORANGE).max() <= 4


def test_pixels_that_are_not_square_become_so() -> None:
    assert played(film(plain(48, 64), shape=Fraction(4, 3))).shape == (36, 64, 3)
    assert played(film(plain(48, 64), shape=Fraction(1, 2))).shape == (48, 32, 3)
    assert played(film(plain(48, 64), shape=Fraction(1, 1))).shape == (48, 64, 3)
    assert played(film(plain(48, 64), shape=Fraction(16, 1))).shape == (3, 64, 3), "never larger than the file"


@pytest.mark.parametrize(("turn", "corner"), [(0, (0, 0)), (90, (1, 0)), (180, (1, 1)), (270, (0, 1))])
def test_a_film_stands_upright(turn: int, corner: tuple[int, int]) -> None:
    """A telephone that is held upright turns its films by their metadata."""
    pixels = np.zeros((48, 64, 3), np.uint8)
    pixels[:16, :16] = 255
    found = played(film(pixels, turn=turn))
    height, width = (64, 48) if turn in (90, 270) else (48, 64)
    assert found.shape == (height, width, 3)
    assert found[8 if corner[0] == 0 else height - 8, 8 if corner[1] == 0 else width - 8].mean() > 200
    small = played(film(pixels, turn=turn), MediaLimits(max_sampled_pixels=4096))
    assert small.shape[0] * small.shape[1] <= 2048 and (small.shape[0] > small.shape[1]) == (height > width)
