"""Fuzzes the HTTP endpoint: random bytes, heads and bodies, and clients that disconnect early.

A complete request must get a complete response. After input that may be incomplete the client closes its side of the
connection, because the proxy would rightly wait for the rest.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
from collections import Counter

from tests.security.fuzzing.fuzz_bodies import encoded, random_body

_TIMEOUT_S = 60.0
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_LAST_EVENTS = (
    b"[DONE]", b'{"error"', b'{"type":"message_stop"', b'{"type":"error"', b'{"type":"response.completed"',
    b'{"type":"response.incomplete"', b'{"type":"response.failed"',
)  # fmt: skip
"""Beginnings of the last event of a stream, of each API."""
_HEADERS = (
    "Authorization: bearer x", "X-Api-Key: x", "Origin: https://example.com", "X-Tandem-Timeline: 1",
    "X-Tandem-Record: 1",
    "X-Request-Timeout: 0.01", "Accept-Encoding: gzip", "Content-Encoding: gzip", "anthropic-version: 2023-06-01",
    "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "Content-Type: text/plain",
)  # fmt: skip
"""Headers as clients, gateways and browsers send them."""


class HttpFuzzer:
    """`outcomes` counts responses by status, and "closed" for connections that the proxy closed without one.

    `internal_errors` has the requests and responses of status 500.
    """

    def __init__(self, rng: random.Random, port: int, model: str) -> None:
        self._rng = rng
        self._port = port
        self._model = model
        self.outcomes: Counter[str] = Counter()
        self.internal_errors: list[str] = []

    def send_one(self) -> None:
        """Sends one input and waits for its end.

        Raises TimeoutError when the proxy hangs, ValueError when a complete request gets no complete response.
        """
        rng = self._rng
        match rng.choices(("bytes", "head", "body", "disconnect"), weights=(20, 20, 50, 10))[0]:
            case "bytes":
                self._exchange(rng.randbytes(rng.randrange(1, 300)) + b"\r\n\r\n", is_complete=False)
            case "head":
                self._exchange(self._head(), is_complete=False)
            case "body":
                path, body = random_body(rng, self._model)
                self._exchange(self.request(encoded(rng, body), path), is_complete=True)
            case "disconnect":
                self._disconnect()

    def _head(self) -> bytes:
        rng = self._rng
        method = rng.choice((b"GET", b"POST", b"PUT", b"OPTIONS", b"\0", b"G" * 500))
        path = rng.choice(
            (b"/", b"/v1/models/%00", b"/../../etc/passwd", b"/health?" + b"a" * 2000, b"*", b"/v1/models")
        )
        names = (
            b"Content-Length",
            b"Transfer-Encoding",
            b"X-Request-Id",
            b"Authorization",
            b"Expect",
            b"Host",
            b"Upgrade",
        )
        values = (
            b"",
            b"-1",
            b"chunked",
            b"\xff\xfe",
            b"a" * 5000,
            b"Bearer \x80",
            b"100-continue",
            b"99999999999999",
            b"0",
        )
        lines = [rng.choice(names) + b": " + rng.choice(values) for _ in range(rng.randrange(5))]
        return b"\r\n".join([method + b" " + path + b" HTTP/1.1", b"Connection: close", *lines]) + b"\r\n\r\n"

    def request(self, body: bytes, path: str) -> bytes:
        """Returns a complete request, some as few clients send them: for an upgrade, in HTTP/1.0."""
        rng = self._rng
        version, more = rng.choices(("1.1", "1.0"), (9, 1))[0], ""
        if rng.random() < 0.1:
            more += "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        if rng.random() < 0.2:
            more += rng.choice(_HEADERS) + "\r\n"
        head = f"POST {path} HTTP/{version}\r\nHost: x\r\nConnection: close\r\n{more}"
        return head.encode() + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    def _exchange(self, data: bytes, is_complete: bool) -> None:
        received = b""
        with (
            socket.create_connection(("127.0.0.1", self._port), timeout=_TIMEOUT_S) as connection,
            contextlib.suppress(ConnectionResetError, BrokenPipeError),
        ):
            connection.sendall(data)
            if not is_complete:
                connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65536):
                received += chunk
        has_response = received.startswith(b"HTTP/1.1 ")
        if is_complete and not (has_response and _is_complete(received)):
            raise ValueError(f"no complete response to {data[:2000]!r}: {received[-500:]!r}")
        status = received[9:12].decode() if has_response else "closed"
        self.outcomes[status] += 1
        if status == "500":
            self.internal_errors.append(f"{data[:2000]!r}: {received[-1000:]!r}")

    def _disconnect(self) -> None:
        """Starts a stream, reads little or nothing of it, and disconnects."""
        body = {"model": self._model, "prompt": "hello", "max_tokens": 50, "stream": True, "ignore_eos": True}
        data = self.request(json.dumps(body).encode(), "/v1/completions")
        with socket.create_connection(("127.0.0.1", self._port), timeout=_TIMEOUT_S) as connection:
            connection.sendall(data[: self._rng.choice((10, len(data) - 5, len(data), len(data)))])
            if self._rng.random() < 0.5:
                connection.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    connection.recv(self._rng.choice((1, 100, 4096)))
        self.outcomes["disconnected"] += 1


def _is_complete(response: bytes) -> bool:
    """Tells whether a stream ends with its API's last event, and another response has its Content-Length."""
    head, _, body = response.partition(b"\r\n\r\n")
    if b"text/event-stream" not in head.lower():
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        return length is not None and len(body) == int(length[1])
    if b"transfer-encoding" in head.lower():  # else it ends with its connection
        if not body.endswith(_LAST_CHUNK):
            return False
        body = body.removesuffix(_LAST_CHUNK)
    last = body.removesuffix(b"\n\n").rpartition(b"data: ")[2]
    return last.startswith(_LAST_EVENTS)
