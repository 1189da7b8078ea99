"""JSON documents whose large parts are encoded as they come, and are never copied into one string.

A document is encoded with a hole in place of each large part. Choices of one prompt share the part that repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

Part = bytes | bytearray

MAX_PIECE_BYTES = 64 * 1024
"""Parts are sent in pieces of this size."""
_MARK = b"\0"
"""Stands for a hole. Encoded JSON does not contain it, because control characters in strings are escaped."""
_HOLE = msgspec.Raw(_MARK)

_LINE_ENDS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}
"""Characters that end a line for Python's `str.splitlines` and httpx's `iter_lines`, by which clients read streams, and
that JSON need not escape."""

_encode = msgspec.json.Encoder().encode


def encode(value: Any) -> bytes:
    """Encodes a value as JSON that is one line for every client."""
    encoded = _encode(value)
    if not encoded.isascii():
        for char, escaped in _LINE_ENDS.items():
            encoded = encoded.replace(char, escaped)
    return encoded


class JsonArray:
    """The elements of an array. on_growth: called with the number of bytes before they are added; may raise."""

    def __init__(self, on_growth: Callable[[int], None]) -> None:
        self.data = bytearray()
        self._on_growth = on_growth

    def extend(self, elements: Sequence[Any]) -> None:
        if elements:
            encoded = encode(elements)
            self._on_growth(len(encoded))
            if self.data:
                self.data += b","
            self.data += encoded[1:-1]


class JsonText:
    """A string. on_growth: as of JsonArray."""

    def __init__(self, on_growth: Callable[[int], None]) -> None:
        self.data = bytearray()
        self._on_growth = on_growth

    def push(self, text: str) -> None:
        if text:
            encoded = encode(text)
            self._on_growth(len(encoded))
            self.data += encoded[1:-1]

    def __str__(self) -> str:
        return msgspec.json.decode(b'"' + self.data + b'"', type=str)


class Holes:
    """The large parts of a document, in the order in which the document has them."""

    def __init__(self) -> None:
        self._contents: list[list[Part]] = []

    def array(self, *arrays: JsonArray) -> Any:
        """Returns the hole for one array that has the elements of all of these."""
        content: list[Part] = []
        for array in arrays:
            if array.data:
                content += [b"," if content else b"[", array.data]
        self._contents.append([*(content or [b"["]), b"]"])
        return _HOLE

    def text(self, *texts: JsonText) -> Any:
        """Returns the hole for a string."""
        self._contents.append([b'"', *(text.data for text in texts), b'"'])
        return _HOLE

    def fill(self, document: msgspec.Struct) -> list[Part]:
        """Encodes the document, which must have every hole once and in order."""
        first, *rest = encode(document).split(_MARK)
        parts: list[Part] = [first]
        for content, following in zip(self._contents, rest, strict=True):
            parts += [*content, following]
        return parts


def pieces(parts: Iterable[Part]) -> Iterator[bytes]:
    """Yields the same bytes in pieces of 64 KiB; the last one may be shorter."""
    piece = bytearray()
    for part in parts:
        for start in range(0, len(part), MAX_PIECE_BYTES):
            piece += memoryview(part)[start : start + MAX_PIECE_BYTES]
            if len(piece) >= MAX_PIECE_BYTES:
                yield bytes(piece)
                piece = bytearray()
    if piece:
        yield bytes(piece)
