"""Decodes request bodies that clients have compressed (`Content-Encoding`), within limits.

Data is decoded in slices of 64 KiB, between which the event loop runs, so that a small body that decodes to a large one
keeps nobody waiting. The limit on the size of a body holds for what it decodes to.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Iterator

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from tandem.proxy.answers.errors import BodyTooLarge, UnsupportedContentCoding
from tandem.runtime.errors import InvalidRequest

_SLICE_BYTES = 64 * 1024
"""Decoded at once: about 0.2 ms."""
_INPUT_BYTES = 4096
"""Compressed data given to the decoder at once. It copies what it leaves over, which would be quadratic otherwise."""
_IDENTITY = ("", "identity")
_GZIP = ("gzip", "x-gzip")
_ZLIB_HEADER_BYTES = 2


def coding_of(headers: Headers) -> str:
    """Returns the coding of a body in lower case, "" for none. Raises UnsupportedContentCoding."""
    named = [each.strip().lower() for value in headers.getlist("content-encoding") for each in value.split(",")]
    codings = [coding for coding in named if coding not in _IDENTITY]
    if not codings:
        return ""
    if len(codings) > 1 or codings[0] not in (*_GZIP, "deflate"):
        raise UnsupportedContentCoding(
            f"Content-Encoding {', '.join(codings)[:100]!r} is not supported; send gzip, deflate, or no coding.",
            "content-encoding",
        )
    return codings[0]


def decoded(receive: Receive, coding: str, max_bytes: int, turn: Callable[[], Awaitable[None]]) -> Receive:
    """Returns `receive` for the decoded body, in messages of at most 64 KiB.

    receive: raises where the client disconnects. coding: as `coding_of` returns it. turn: awaited after each slice; see
    `Turns`.

    It raises InvalidRequest for a body that is damaged or incomplete, and BodyTooLarge beyond `max_bytes`.
    """
    decoder = _Decoder(coding)
    slices: Iterator[bytes] = iter(())
    is_last, num_bytes = False, 0

    async def receive_decoded() -> Message:
        nonlocal slices, is_last, num_bytes
        try:
            while (piece := next(slices, None)) is None:
                if is_last:
                    decoder.end()
                    return {"type": "http.request", "body": b"", "more_body": False}
                message = await receive()
                slices, is_last = decoder.decode(message.get("body", b"")), not message.get("more_body", False)
        except zlib.error as error:
            raise InvalidRequest(f"The body is not valid {coding} data.", "content-encoding") from error
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise BodyTooLarge(f"The decoded body is larger than this server's limit of {max_bytes} bytes.")
        await turn()
        return {"type": "http.request", "body": piece, "more_body": True}

    return receive_decoded


class _Decoder:
    """Decodes gzip, or deflate with or without the header of zlib, which some clients leave out.

    Its methods raise zlib.error for data that is damaged, or has something behind its end.
    """

    def __init__(self, coding: str) -> None:
        self._is_gzip = coding in _GZIP
        self._head = b""  # of a deflated body, until its format is known
        self._zlib = zlib.decompressobj(zlib.MAX_WBITS | 16) if self._is_gzip else None

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yields what the data decodes to, in slices, one of them empty where much data decodes to nothing."""
        if self._zlib is None:
            self._head += data
            if len(self._head) < _ZLIB_HEADER_BYTES:
                return
            data = self._head
            self._zlib = zlib.decompressobj(zlib.MAX_WBITS if _has_zlib_header(data) else -zlib.MAX_WBITS)
        for start in range(0, len(data), _INPUT_BYTES):
            yield from self._slices(data[start : start + _INPUT_BYTES])

    def _slices(self, rest: bytes) -> Iterator[bytes]:
        assert self._zlib is not None
        output = b""
        while True:
            if self._zlib.eof and rest:
                if not self._is_gzip:
                    raise zlib.error("data after the end")
                self._zlib = zlib.decompressobj(zlib.MAX_WBITS | 16)  # another member
            room = _SLICE_BYTES - len(output)
            piece = self._zlib.decompress(rest, room)
            output, is_full = output + piece, len(piece) == room
            rest = self._zlib.unconsumed_tail or self._zlib.unused_data
            if is_full:  # the decoder may hold more
                yield output
                output = b""
            elif not rest:
                break
        yield output

    def end(self) -> None:
        """Checks that the data is complete."""
        if self._zlib is None or not self._zlib.eof:
            raise zlib.error("the data ends too early")


def _has_zlib_header(data: bytes) -> bool:
    """Returns whether data begins as RFC 1950 demands: method 8 and a check sum."""
    return data[0] & 15 == 8 and (data[0] << 8 | data[1]) % 31 == 0
