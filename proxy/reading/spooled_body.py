"""Large request bodies in a file in memory, for another process to read.

A megabyte that is joined, pickled and sent through a pipe costs the loop milliseconds and the heap its size several
times over. Written to a memfd as it comes, it costs one copy, never lies in this process's heap, and goes with its last
descriptor, whoever dies.
"""

from __future__ import annotations

import os
import re

from tandem.runtime.file_limits import out_of_descriptors

_MEDIA_FIELD = re.compile(rb"\"(?:image|video)_url\"")
_TAIL_BYTES = 10
"""One less than what is looked for has: a piece may end in the middle of it."""
_SEARCHED_BYTES = 64 * 1024
"""Of a large body: images mostly come early, and to find none in a long text would cost the loop a millisecond."""


def mentions_media(body: bytes | SpooledBody) -> bool:
    """Whether it looks like a request with images or video; a guess, so that it need not be decoded to know.

    Where it is wrong the body is decoded twice, once by a reader that finds media.
    """
    return body.mentions_media if isinstance(body, SpooledBody) else _MEDIA_FIELD.search(body) is not None


class SpooledBody:
    """path: where any process of this user can read it, until `close`. Raises Overloaded where no more can be kept."""

    def __init__(self) -> None:
        try:
            self._fd = os.memfd_create("body")
        except OSError as error:
            if (none_left := out_of_descriptors(error, "large requests")) is not None:
                raise none_left from error
            raise
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.num_bytes = 0
        self.mentions_media = False
        self._tail = b""

    def write(self, piece: bytes) -> None:
        if not self.mentions_media and self.num_bytes < _SEARCHED_BYTES:
            self.mentions_media = _MEDIA_FIELD.search(self._tail + piece[:_TAIL_BYTES]) is not None or bool(
                _MEDIA_FIELD.search(piece)
            )
            self._tail = (self._tail + piece[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        self.num_bytes += len(piece)
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def close(self) -> None:
        os.close(self._fd)
