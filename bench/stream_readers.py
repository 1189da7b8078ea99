"""`python -m bench.stream_readers PORT MODEL N`: N streamed completions, read to nowhere until killed.

Prints a line when all have begun. A stream that ends is begun again, so that there are always N.

The readers stand for other machines but run on the cores of this one, so they take as little of them as they can: what
has come is read five times a second. Woken by each token they used a fifth of a core, and as they were woken where
the proxy wrote, it was the proxy that waited.
"""

from __future__ import annotations

import json
import socket
import sys
import time

from bench.load_process import step_aside

_MAX_TOKENS = 2000
_PAUSE_S = 0.2
_CONNECT_TIMEOUT_S = 30.0
_DONE = b"data: [DONE]"


class Reader:
    """One stream after the other, over a connection each."""

    def __init__(self, port: int, model: str, number: int) -> None:
        body = json.dumps(
            {
                "model": model,
                "prompt": [4 + number % 1000] * 8,
                "max_tokens": _MAX_TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}"
        self._request = f"{head}\r\n\r\n{body}".encode()
        self._port = port
        self.has_begun = False
        self._ask()

    def _ask(self) -> None:
        self._connection = socket.create_connection(("127.0.0.1", self._port), _CONNECT_TIMEOUT_S)
        self._connection.sendall(self._request)
        self._connection.setblocking(False)
        self._head = self._tail = b""

    def read(self, buffer: bytearray) -> None:
        """All that has come. Raises RuntimeError when the server refuses or ends a stream with an error."""
        while True:
            try:
                num_bytes = self._connection.recv_into(buffer)
            except BlockingIOError:
                return
            if not num_bytes:
                self._end()
                return
            self._tail = (self._tail + buffer[:num_bytes])[-200:]
            if len(self._head) < 200:
                self._head += buffer[: min(num_bytes, 200)]
                if b"\r\n" in self._head and b" 200 " not in self._head.split(b"\r\n")[0]:
                    raise RuntimeError(f"a stream was refused: {self._head!r}")
            self.has_begun |= buffer.find(b"data: ", 0, num_bytes) >= 0

    def _end(self) -> None:
        if _DONE not in self._tail:
            raise RuntimeError(f"a stream ended early: {self._tail!r}")
        self._connection.close()
        self._ask()


def main(port: int, model: str, num_streams: int) -> None:
    readers = [Reader(port, model, number) for number in range(num_streams)]
    buffer = bytearray(65536)
    is_told = False
    while True:
        for reader in readers:
            reader.read(buffer)
        if not is_told and all(reader.has_begun for reader in readers):
            is_told = True
            print("all have begun", flush=True)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    step_aside()
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
