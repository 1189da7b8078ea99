"""Bodies as they arrive: small ones as bytes; large ones in a file in memory, for another process to read.

A megabyte that is joined, pickled and sent through a pipe costs the loop milliseconds and the heap its size several
times over. Written to a memfd as it comes, it costs one copy, never lies in this process's heap, and goes with its last
descriptor, whoever dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from litestar.types import Receive

from tandem.proxy.answers.errors import BodyTooLarge, ClientDisconnected, ClientTooSlow
from tandem.proxy.reading.spooled_body import SpooledBody
from tandem.runtime.errors import Overloaded

T = TypeVar("T")

_PROGRESS_BYTES = 16 * 1024
MAX_UNSPOOLED_BYTES = 16 * 1024
MAX_SPOOLED_BYTES = 1 << 30
"""Of all large bodies together. Beyond that, large bodies are refused."""


class RequestBodies:
    def __init__(self, max_bytes: int, timeout_s: float, max_spooled_bytes: int = MAX_SPOOLED_BYTES) -> None:
        """max_bytes: of one body. timeout_s: for each 16 KiB of it to arrive."""
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._max_spooled_bytes = max_spooled_bytes
        self.num_spooled_bytes = 0

    @asynccontextmanager
    async def receive(self, receive: Receive, headers: Any) -> AsyncGenerator[bytes | SpooledBody, None]:
        """The whole body of the request; a large one is there until the context ends.

        Raises BodyTooLarge, ClientTooSlow, Overloaded while too much is being uploaded, ClientDisconnected.
        """
        announced = headers.get("content-length", "")
        if announced.isdecimal():
            self._check_size(int(announced))
        spooled: SpooledBody | None = None
        small = b""
        try:
            more = True
            if announced.isdecimal() and int(announced) > MAX_UNSPOOLED_BYTES:
                await asyncio.sleep(0)
            watch = _Progress(self._timeout_s)
            while more:
                message: Any = await watch.wait_for(receive())
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected("the client went away in the middle of the body")
                piece, more = message.get("body", b""), message.get("more_body", False)
                watch.on_bytes(len(piece))
                if spooled is None:
                    small += piece
                    if len(small) <= MAX_UNSPOOLED_BYTES:
                        continue
                    spooled, piece = SpooledBody(), small
                self._check_size(spooled.num_bytes + len(piece))
                if self.num_spooled_bytes + len(piece) > self._max_spooled_bytes:
                    raise Overloaded("too many large requests are waiting to be read; try again later")
                self.num_spooled_bytes += len(piece)
                spooled.write(piece)
                await asyncio.sleep(0)
            yield small if spooled is None else spooled
        finally:
            if spooled is not None:
                self.num_spooled_bytes -= spooled.num_bytes
                spooled.close()

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise BodyTooLarge(f"The body is larger than this server's limit of {self._max_bytes} bytes.")


class _Progress:
    """A deadline that moves on with every 16 KiB."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._num_bytes = 0
        self._deadline = asyncio.get_running_loop().time() + timeout_s

    async def wait_for(self, message: Awaitable[T]) -> T:
        """Raises ClientTooSlow."""
        try:
            async with asyncio.timeout_at(self._deadline):
                return await message
        except TimeoutError:
            raise ClientTooSlow(
                f"The body arrived too slowly: less than {_PROGRESS_BYTES} bytes in {self._timeout_s:g} s."
            ) from None

    def on_bytes(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes >= _PROGRESS_BYTES:
            self._num_bytes = 0
            self._deadline = asyncio.get_running_loop().time() + self._timeout_s
