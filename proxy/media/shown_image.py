"""Turns a decoded image into what a viewer shows: upright, 8 bits, sRGB, on white.

transformers' processors convert to RGB only, which clips grey levels of 16 bits and takes the numbers of any colour
space for sRGB.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image, ImageCms

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
