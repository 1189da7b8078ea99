"""Counts what a client sends around its bodies: heads, chunk sizes and extensions, trailers, empty lines.

The parser keeps headers and trailers as Python objects, which are many times larger than the bytes that were sent. So
their number and size are limited, for each message as a whole.
"""

from __future__ import annotations

from array import array
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem.proxy.answers.errors import HeadTooLarge, UnsupportedTransferCoding
from tandem.runtime.errors import InvalidRequest, TandemError

MAX_HEAD_BYTES = 64 * 1024
"""All bytes of one message beside its body: request line, headers, chunk sizes and extensions, trailers."""
MAX_HEADERS = 128
"""Headers and trailers of one message. Browsers and SDKs send 10 to 30, and load balancers add about ten."""
MAX_PIPELINED = 8
"""Requests that may wait on a connection while one is answered. Most clients send none."""
_CHUNK_BYTES_PER_BODY_BYTE = 8
"""Allowance for the framing of small chunks. A chunk of one byte has five bytes around it."""


class RequestFraming:
    """The parts of messages that one connection's parser has seen. Pure.

    error: why the message that the parser is in must be refused; None while it is within its limits.
    num_heads, num_complete: complete heads and whole messages so far. is_in_head: a head has begun.
    """

    def __init__(self) -> None:
        self.error: TandemError | None = None
        self.num_heads = 0
        self.num_complete = 0
        self.is_in_head = False
        self._num_other_bytes = 0
        self._num_body_bytes = 0
        self._num_headers = 0

    @property
    def is_in_body(self) -> bool:
        """Whether a head is complete and what follows it is not."""
        return self.num_heads > self.num_complete

    def on_bytes(self, num_bytes: int) -> None:
        """Some bytes arrived; what they are is reported after it."""
        self._num_other_bytes += num_bytes

    def on_begin(self, num_waiting: int) -> None:
        """A message begins. num_waiting: requests before it that the application has not begun with."""
        self.is_in_head = True
        if num_waiting >= MAX_PIPELINED:
            self._fail(InvalidRequest(f"More than {MAX_PIPELINED} requests wait on this connection; read the answers."))

    def on_header(self, name: bytes = b"", value: bytes = b"") -> None:
        """A header or trailer. The parser itself takes a body whose last coding is chunked for a plain one."""
        if name.lower() == b"transfer-encoding" and self.is_in_head and value.strip().lower() != b"chunked":
            self._fail(UnsupportedTransferCoding("The only Transfer-Encoding that is supported is chunked."))
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            self._fail(HeadTooLarge(f"The request has more than {MAX_HEADERS} headers and trailers."))

    def on_head_complete(self) -> None:
        self.is_in_head = False
        self.num_heads += 1

    def on_repeated_head(self) -> None:
        """The parser is given the head of the message again, which counts once."""
        self._num_headers = 0

    def on_body(self, num_bytes: int) -> None:
        self._num_other_bytes -= num_bytes
        self._num_body_bytes += num_bytes

    def on_complete(self) -> None:
        """The message is complete. What follows in the same piece of data counts towards no limit."""
        self.num_complete += 1
        self._num_other_bytes = self._num_body_bytes = self._num_headers = 0

    def check(self) -> None:
        """Sets `error` where the bytes beside the body are too many. Call it after each piece of data."""
        if self._num_other_bytes > MAX_HEAD_BYTES + _CHUNK_BYTES_PER_BODY_BYTE * self._num_body_bytes:
            self._fail(
                HeadTooLarge(
                    f"The request has more than {MAX_HEAD_BYTES} bytes of headers, chunk extensions and trailers."
                )
            )

    def on_invalid(self) -> None:
        """The parser gave up."""
        self._fail(InvalidRequest("The request is not valid HTTP/1.1."))

    def _fail(self, error: TandemError) -> None:
        self.error = self.error or error


class _LimitReached(Exception):
    """Makes httptools stop parsing."""


class UpgradeIgnoringParser(httptools.HttpRequestParser):
    """A parser that reads a request which asks for another protocol as if it did not ask (RFC 9110, 7.8).

    httptools takes what follows the head of such a request for the other protocol. Java's client asks for HTTP/2 in
    each first request of a connection, with the body behind it.

    Where the protocol has just seen such a head, a new parser reads it again without its `Upgrade` headers, and then
    the rest. So both parts of the request are framed by one parser. The old one may have seen `Connection: close`.
    """

    def __init__(self, protocol: FramedHttpProtocol) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._protocol = protocol

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        parse, rest = super().feed_data, memoryview(data)
        while True:
            try:
                parse(rest)
            except httptools.HttpParserUpgrade as upgrade:
                head = self._protocol.take_plain_head()
                if not head:
                    raise  # CONNECT
                self._protocol.parser = parser = UpgradeIgnoringParser(self._protocol)
                parse = super(UpgradeIgnoringParser, parser).feed_data
                parse(head)
                rest = rest[upgrade.args[0] :]
            else:
                return


class FramedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which reports to `framing`. It overrides the callbacks that httptools documents.

    Each request's scope has the connection, which is the transport of this protocol, as `state["connection"]`.
    """

    def __init__(self, framing: RequestFraming, **arguments: Any) -> None:
        self._framing = framing
        self._plain_head = b""  # of a request that asks for an upgrade, while the parser is to read it again
        super().__init__(**arguments)
        self.parser = UpgradeIgnoringParser(self)

    def on_message_begin(self) -> None:
        self._framing.on_begin(len(self.pipeline))
        self._stop_at_limit()
        super().on_message_begin()
        self.scope["state"]["connection"] = self.transport

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framing.on_header(name, value)
        self._stop_at_limit()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._plain_head = self._head_without_upgrade()
            return
        super().on_headers_complete()
        self._framing.on_head_complete()

    def on_body(self, body: bytes) -> None:
        self._framing.on_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._plain_head:
            return  # the parser took the head for the whole message
        self._framing.on_complete()
        super().on_message_complete()

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def take_plain_head(self) -> bytes:
        """Returns the head without `Upgrade` headers where the one just parsed had them, else b""."""
        head, self._plain_head = self._plain_head, b""
        if head:
            self._framing.on_repeated_head()
        return head

    def _stop_at_limit(self) -> None:
        if self._framing.error is not None:
            raise _LimitReached
