"""Receives request bodies within limits on size and pace.

Small bodies are bytes. Large ones are written to a file in memory as they arrive, so that another process can read them
without a copy through a pipe.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from tandem.proxy.admission.budgets import ByteBudget, DescriptorBudget
from tandem.proxy.answers.errors import BodyTooLarge, ClientTooSlow, UnsupportedContentCoding
from tandem.proxy.answers.http_answers import ClientDisconnected
from tandem.proxy.reading.spooled_body import SpooledBody
from tandem.runtime.tasks import LoopTurns

_PROGRESS_BYTES = 16 * 1024
MAX_UNSPOOLED_BYTES = 16 * 1024
MAX_UNORDERED_BYTES = 64 * 1024
"""Size up to which a body is read as soon as it arrives. Larger ones are read in turn."""
MAX_SPOOLED_BYTES = 1 << 30
"""All large bodies together, three quarters of it of one client. Beyond that, large bodies are refused."""


class RequestBodies:
    def __init__(
        self,
        max_bytes: int,
        timeout_s: float,
        max_spooled_bytes: int = MAX_SPOOLED_BYTES,
        descriptors: DescriptorBudget | None = None,
    ) -> None:
        """max_bytes: of one body. timeout_s: for each 16 KiB of a body to arrive. descriptors: each large body is a
        file; None for no limit."""
        self._descriptors = descriptors or DescriptorBudget()
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._bytes = ByteBudget(max_spooled_bytes)
        self._turns = LoopTurns()  # of all large bodies, one is read or answered in each: 256 KiB take 1 ms

    @asynccontextmanager
    async def receive(
        self, receive: Receive, headers: Headers, client: str = ""
    ) -> AsyncGenerator[bytes | SpooledBody, None]:
        """Yields the whole body. A large one is deleted at the end of the context.

        Raises BodyTooLarge, ClientTooSlow, ClientDisconnected, UnsupportedContentCoding, and while too much is being
        uploaded, ClientShareExceeded (by this client) or Overloaded (by all).
        """
        spooled: SpooledBody | None = None
        small = b""
        try:
            more = True
            limited = self.limited(receive, headers, self._max_bytes)
            while more:
                message = await limited()
                piece, more = message.get("body", b""), message.get("more_body", False)
                if spooled is None:
                    small += piece
                    if len(small) <= MAX_UNSPOOLED_BYTES:
                        continue
                    spooled, piece = self._spool(client), small
                self._bytes.take(client, len(piece))
                spooled.write(piece)
            yield small if spooled is None else spooled
        finally:
            if spooled is not None:
                self._bytes.give_back(client, spooled.num_bytes)
                spooled.close()
                self._descriptors.give_back(client)
                await self._turns.next()  # what has been read of many bodies at once is answered in turn, too

    def _spool(self, client: str) -> SpooledBody:
        self._descriptors.take(client)
        try:
            return SpooledBody()
        except BaseException:
            self._descriptors.give_back(client)
            raise

    def limited(self, receive: Receive, headers: Headers, max_bytes: int) -> Receive:
        """Returns `receive` for one body of at most `max_bytes`, with the limit on pace.

        It raises BodyTooLarge, ClientTooSlow, ClientDisconnected. Raises UnsupportedContentCoding, BodyTooLarge.
        """
        coding = headers.get("content-encoding", "identity")
        if coding.lower() not in ("", "identity"):
            raise UnsupportedContentCoding(
                f"Content-Encoding {coding[:100]!r} is not supported; send the body as it is.", "content-encoding"
            )
        announced = headers.get("content-length", "")
        num_announced = int(announced) if announced.isdecimal() else 0
        _check(num_announced, max_bytes)
        now, timeout_s = asyncio.get_running_loop().time, self._timeout_s
        deadline, num_bytes, num_timed_bytes = now() + timeout_s, 0, 0

        async def receive_limited() -> Message:
            nonlocal deadline, num_bytes, num_timed_bytes
            if max(num_announced, num_bytes) > MAX_UNORDERED_BYTES:
                came = now()
                # Nothing is held while a client's data is awaited, so a client that sends slowly delays no other.
                await self._turns.next()
                deadline += now() - came
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                raise ClientTooSlow(
                    f"The body arrived too slowly: less than {_PROGRESS_BYTES} bytes in {timeout_s:g} s."
                ) from error
            if message["type"] == "http.disconnect":
                raise ClientDisconnected("the client disconnected before its body was complete")
            num_new_bytes = len(message.get("body", b""))
            num_bytes, num_timed_bytes = num_bytes + num_new_bytes, num_timed_bytes + num_new_bytes
            _check(num_bytes, max_bytes)
            if num_timed_bytes >= _PROGRESS_BYTES:
                deadline, num_timed_bytes = now() + timeout_s, 0
            return message

        return receive_limited


def _check(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise BodyTooLarge(f"The body is larger than this server's limit of {max_bytes} bytes.")
