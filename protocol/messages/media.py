"""Images and videos of a prompt on the wire: positions of their placeholder tokens, and location of their tensors.

The tensors are those of the model's Hugging Face processor, under its names. They stay in shared memory, which the
proxy keeps readable until the prompt is computed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from tandem.runtime.errors import InvalidRequest

DIGEST_BYTES = 32
MediaKind = Literal["image", "video"]

BYTES_PER_ELEMENT = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int64": 8, "int32": 4, "uint8": 1}
"""Supported tensor types."""

_SEGMENT = re.compile(r"/dev/shm/[^/\0]+|/proc/\d+/fd/\d+")  # noqa: S108  # a pattern, not a file
"""Paths that workers open. Others could lead to private files, or to a pipe that blocks the worker."""


class MediaTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of an item: row-major elements of `shape`, at `offset` of the segment.

    name: the processor's, e.g. "pixel_values". dtype: torch's name, e.g. "float32".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class MediaItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One image or video of a prompt."""

    digest: bytes
    """Hash of source bytes, the processing options and the model's identity. Items of equal digests share cached KV."""
    kind: MediaKind
    spans: tuple[tuple[int, int], ...]
    """(start, length) of its placeholder tokens in the prompt, ascending; a video may have several."""
    segment: str
    """Path of the shared memory file that holds the tensors."""
    tensors: tuple[MediaTensor, ...]

    @property
    def num_tokens(self) -> int:
        """Number of placeholder tokens."""
        return sum(length for _, length in self.spans)


def check_media(media: Sequence[MediaItem], num_prompt_tokens: int) -> None:
    """Checks items without opening their segments. Raises InvalidRequest, which names the item."""
    for number, item in enumerate(media):
        problem = _problem(item, num_prompt_tokens)
        if problem is not None:
            raise InvalidRequest(f"media item {number}: {problem}")
    spans = sorted((span, number) for number, item in enumerate(media) for span in item.spans)
    for ((start, length), one), ((next_start, _), other) in itertools.pairwise(spans):
        if start + length > next_start:
            raise InvalidRequest(f"media items {one} and {other} overlap at token {next_start} of the prompt")


def check_segment(item: MediaItem, segment_bytes: int) -> None:
    """Raises InvalidRequest if the item's tensors exceed a segment of this size."""
    for tensor in item.tensors:
        if tensor.offset + tensor.num_bytes > segment_bytes:
            raise InvalidRequest(
                f"{tensor.name} ends at byte {tensor.offset + tensor.num_bytes} of a segment of {segment_bytes} bytes"
            )


def _problem(item: MediaItem, num_prompt_tokens: int) -> str | None:
    if len(item.digest) != DIGEST_BYTES:
        return f"its digest has {len(item.digest)} bytes, not {DIGEST_BYTES}"
    if not item.spans:
        return "it has no placeholder tokens in the prompt"
    end = 0
    for start, length in item.spans:
        if length < 1 or start < end:
            return f"its span of {length} tokens at {start} is empty or out of order"
        end = start + length
    if end > num_prompt_tokens:
        return f"its placeholders end at token {end} of a prompt of {num_prompt_tokens}"
    if not _SEGMENT.fullmatch(item.segment):
        return f"its segment {item.segment!r} is no file in /dev/shm and no /proc/PID/fd/N"
    names = [tensor.name for tensor in item.tensors]
    if len(set(names)) < len(names):
        return "two of its tensors have one name"
    for tensor in item.tensors:
        size = BYTES_PER_ELEMENT.get(tensor.dtype)
        if size is None:
            return f"{tensor.name} has the type {tensor.dtype!r}, not one of {', '.join(BYTES_PER_ELEMENT)}"
        if tensor.offset < 0 or tensor.offset % size or any(length < 0 for length in tensor.shape):
            return f"{tensor.name} has a negative size or offset, or does not lie at a multiple of {size} bytes"
        if math.prod(tensor.shape) * size != tensor.num_bytes:
            return f"{tensor.name} of shape {list(tensor.shape)} has {tensor.num_bytes} bytes"
    return None
