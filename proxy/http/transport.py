"""What a connection writes through: an answer's head goes out together with what follows it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


class JoinedHeads:
    """A transport that holds an answer's head back until the body begins, or the loop's turn is over.

    uvicorn writes the two apart, and uvloop sends each write at once: two system calls, two packets, and a client that
    wakes up twice.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""

    def write(self, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        elif data.startswith(b"HTTP/1.1 "):
            self._held = data
            self._loop.call_soon(self._let_go)
            return
        self._transport.write(data)

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.write(b"".join(pieces))

    def write_eof(self) -> None:
        self._let_go()
        self._transport.write_eof()

    def close(self) -> None:
        self._let_go()
        self._transport.close()

    def _let_go(self) -> None:
        if self._held:
            data, self._held = self._held, b""
            if not self._transport.is_closing():
                self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
