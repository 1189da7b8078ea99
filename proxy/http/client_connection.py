"""HTTP connections with limits on what one client may cost, around uvicorn's protocol.

uvicorn parses requests and runs the application. This module adds what uvicorn has no options for:

- the number of connections;
- TLS handshakes within a time limit;
- the size of what a request has beside its body (431) and the time its head may take to arrive (408);
- a client that does not read its answer is disconnected;
- a request that is answered before its body has arrived: the answer says `Connection: close`, and what the client still
  sends is discarded for a limited time;
- a graceful stop that waits for a request whose head is still arriving.

`ClientConnection` stands between asyncio's transport and uvicorn's protocol and uses the public interface of both.
`track_requests`, an ASGI middleware, reports to it when a request begins and when its answer is complete.
The size and pace of bodies are limited in `proxy.http.bodies`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import ssl
import termios
from array import array
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem.proxy.answers.errors import ClientTooSlow, HeadTooLarge, UnsupportedTransferCoding, error_body, status_of
from tandem.proxy.http.connection_limits import ConnectionLimits
from tandem.runtime.errors import InvalidRequest, TandemError
from tandem.runtime.tasks import start_job

log = logging.getLogger(__name__)

KERNEL_BUFFER_BYTES = 256 * 1024
"""Kernel send buffer per connection. Without a limit it grows to several MiB for a client that does not read."""
_PIECE_BYTES = 4096
"""Data is parsed in pieces of this size. After each one the limits are checked."""
_BODY_PIECE_BYTES = 64 * 1024
"""Within a body the pieces are larger, because most of them are nothing else."""
_LAST_HEAD_S = 0.5
"""How long a server that stops waits for the head of a request on a connection that it has accepted."""
_LINGER_S = 2.0
"""How long a connection stays open for the rest of a request that has been answered. What arrives is discarded. Closing
at once would reset the connection, and the client could lose the answer."""


class ClientConnection(asyncio.Protocol, asyncio.Transport):
    """One client's connection: applies the limits and passes everything else on to uvicorn's protocol.

    It is a protocol to asyncio's transport, and the transport of uvicorn's protocol.

    A connection is in one of these states:
    - it is not open: accepted, and perhaps counted, while `TlsAccept` shakes hands;
    - it waits for a head, with a timer from the first byte (from the start for its first request);
    - a request is in flight: from the end of its head to `on_answer_complete`;
    - it is closing: nothing more is written to the client or passed on to uvicorn. What the client still sends is
      discarded for a short time, so that it can read its answer.
    """

    def __init__(
        self,
        make_http: Callable[[RequestFraming], asyncio.Protocol],
        limits: ConnectionLimits,
        timeout_s: float,
    ) -> None:
        """make_http: makes uvicorn's protocol, when the connection opens. It reports to the framing.

        timeout_s: for a head to arrive, and for 16 KiB of an answer to be read.
        """
        super().__init__()
        self.is_open = False
        self._make_http = make_http
        self._http = asyncio.Protocol()
        self._framing = RequestFraming()
        self._limits = limits
        self._timeout_s = timeout_s
        self._transport: asyncio.Transport
        self._address: str | None = None  # the client's, while the connection is counted
        self._head_timer = Timer()
        self._is_parsing = False
        self._body_complete = True
        self._answer_begun = False
        self._num_answered = 0
        self._error: TandemError | None = None  # to send after the answers to what arrived before
        self._is_closing = False
        self._close_timer = Timer()
        self._read_watch = ReadWatch(timeout_s)

    # ---- asyncio's side

    def admit(self, transport: asyncio.BaseTransport) -> TandemError | None:
        """Counts the connection until `connection_lost`. Returns an error where a limit is reached."""
        peer = transport.get_extra_info("peername")
        address = peer[0] if isinstance(peer, tuple) else ""
        error = self._limits.add(address, self)
        if error is None:
            self._address = address
        return error

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BUFFER_BYTES)
        if self._address is None and (error := self.admit(transport)) is not None:
            self._is_closing = True
            transport.write(_refusal(error))
            transport.close()
            return
        self.is_open = True
        self._http = self._make_http(self._framing)
        self._http.connection_made(self)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        if not self._is_closing and self._error is None:  # otherwise it is discarded
            self._parse(data)

    def eof_received(self) -> bool | None:
        if self.is_open and not self._is_closing:
            self._http.eof_received()
        return None  # the transport closes

    def pause_writing(self) -> None:
        if self.is_open:
            self._http.pause_writing()
        self._read_watch.start(self._transport)  # uvicorn adds nothing while writing is paused

    def resume_writing(self) -> None:
        if self.is_open:
            self._http.resume_writing()
        if not self._is_closing:
            self._read_watch.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._head_timer.cancel()
        self._close_timer.cancel()
        self._read_watch.cancel()
        self._stop_counting()
        if self.is_open:
            self.is_open = False
            self._http.connection_lost(exc)
            # Both refer to each other. A cycle would keep TLS's buffers of 256 KiB until the next garbage collection.
            self._http = asyncio.Protocol()

    def _stop_counting(self) -> None:
        if self._address is not None:
            self._limits.remove(self._address, self)
            self._address = None

    # ---- the limits' side

    @property
    def has_request(self) -> bool:
        return self._in_flight

    def abandon(self) -> None:
        """Closes the connection at once, for another one that takes its place."""
        self._stop_counting()
        self._is_closing = True
        self._transport.abort()

    # ---- requests as they arrive

    @property
    def _in_flight(self) -> bool:
        return self._framing.num_heads > self._num_answered

    def _parse(self, data: bytes) -> None:
        if not self._in_flight and not self._head_timer.is_running:
            self._start_head_timer()
        self._is_parsing = True
        start = 0
        while start < len(data):
            piece = data[start : start + (_BODY_PIECE_BYTES if self._framing.is_in_body else _PIECE_BYTES)]
            start += len(piece)
            self._framing.on_bytes(len(piece))
            self._http.data_received(piece)
            self._framing.check()
            if self._framing.error is not None:
                break
        self._is_parsing = False
        if self._in_flight:
            self._head_timer.cancel()
        if self._framing.error is not None:
            self._refuse(self._framing.error)

    def _start_head_timer(self) -> None:
        self._head_timer.start(self._timeout_s, self._on_late_head)

    def _on_late_head(self) -> None:
        if self._framing.is_in_head:
            self._refuse(ClientTooSlow(f"The request's head did not arrive within {self._timeout_s:g} s."))
        else:
            self._close_now()  # the client sent nothing, or empty lines

    def _refuse(self, error: TandemError) -> None:
        """Answers with an error and closes, after the answers to all requests that arrived complete."""
        if self._is_closing or self._error is not None:
            return
        if self._framing.num_complete > self._num_answered or self._answer_begun:
            self._error = error
            return
        self._transport.write(_refusal(error))
        self._linger()

    # ---- the application's side, by way of `track_requests`

    def on_request(self, has_body: bool) -> None:
        """The application begins with a request."""
        self._body_complete = not has_body

    def on_body_complete(self) -> None:
        """The application has the whole body of its request."""
        self._body_complete = True

    def on_answer_begin(self) -> bool:
        """Returns True where the answer must say `Connection: close`."""
        self._answer_begun = True
        return not self._body_complete or self._limits.is_stopping

    def on_answer_complete(self) -> None:
        self._answer_begun = False
        self._num_answered += 1
        if self._is_closing:
            return
        if self._error is not None:
            if self._framing.num_complete <= self._num_answered:
                self._transport.write(_refusal(self._error))
                self._linger()
        elif self._framing.is_in_head and not self._in_flight:
            self._start_head_timer()

    # ---- uvicorn's side: the methods of a transport that it calls

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_parsing:  # uvicorn writes to its transport while it parses only to refuse what it cannot parse
            self._framing.on_invalid()
        elif not self._is_closing:
            self._transport.write(data)

    def close(self) -> None:
        """Closes once no answer can be lost."""
        if self._is_closing or self._is_parsing:
            return
        if not self._body_complete or self._error is not None:
            self._linger()
        elif self._limits.is_stopping and self._head_timer.is_running:
            self._close_timer.start(_LAST_HEAD_S, self._close_unless_asked)
        else:
            self._close_now()

    def _close_unless_asked(self) -> None:
        if self._head_timer.is_running:
            self._close_now()

    def _linger(self) -> None:
        """Ends the answer, then discards what the client still sends until it closes or a limit is reached."""
        self._is_closing = True
        self._head_timer.cancel()
        if self._transport.can_write_eof():  # not with TLS
            self._transport.write_eof()
        self._transport.resume_reading()
        self._close_timer.start(_LINGER_S, self._close_now)

    def _close_now(self) -> None:
        self._is_closing = True
        self._head_timer.cancel()
        self._close_timer.cancel()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._read_watch.start(self._transport)


def track_requests(app: ASGIApp) -> ASGIApp:
    """ASGI middleware that reports each request to its connection and closes connections after their last answer."""

    async def tracked(scope: Scope, receive: Receive, send: Send) -> None:
        connection: ClientConnection = scope["state"]["connection"]
        names = {name for name, value in scope["headers"] if value != b"0"}
        connection.on_request(has_body=b"content-length" in names or b"transfer-encoding" in names)

        async def receive_body() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                connection.on_body_complete()
            return message

        async def send_answer(message: Message) -> None:
            if message["type"] == "http.response.start" and connection.on_answer_begin():
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                connection.on_answer_complete()

        if scope["http_version"] == "1.0":
            await app(dict(scope), receive_body, _delimited_by_close(scope, connection, send_answer))
        else:
            await app(scope, receive_body, send_answer)

    return tracked


def _delimited_by_close(scope: Scope, connection: ClientConnection, send: Send) -> Send:
    """Returns `send` for a client of HTTP/1.0: a body of unknown length ends with the connection.

    uvicorn would send such a body in chunks, which HTTP/1.0 does not have. It is told that the request is a HEAD, so
    that it sends no body, and the body is written here. scope: uvicorn's own; the application has a copy.
    """
    is_unframed = False

    async def send_unframed(message: Message) -> None:
        nonlocal is_unframed
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            is_unframed = b"content-length" not in names and scope["method"] != "HEAD"
            if is_unframed:
                scope["method"] = "HEAD"
        elif is_unframed and (body := message.get("body", b"")):
            await send({"type": "http.response.body", "body": b"", "more_body": True})  # waits for a slow reader
            connection.write(body)
        await send(message)

    return send_unframed


def _refusal(error: TandemError) -> bytes:
    """Returns a whole answer, after which the connection is closed."""
    status, body = status_of(error), error_body(error)
    retry_after = b"retry-after: 1\r\n" if status in (429, 503) else b""
    head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nconnection: close\r\n%scontent-length: %d\r\n\r\n"
    return head % (status, HTTPStatus(status).phrase.encode(), retry_after, len(body)) + body


class Timer:
    """Calls back once after a delay, unless it is cancelled or started again before."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self, delay_s: float, callback: Callable[..., None], *arguments: Any) -> None:
        self.cancel()
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._fire, callback, arguments)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self, callback: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._handle = None
        callback(*arguments)


_MIN_PROGRESS_BYTES = 16 * 1024
"""Bytes that a client must read from its answer within the time limit while its buffer is full."""


class ReadWatch:
    """Aborts a transport while it is watched and the client reads less than 16 KiB within the time limit.

    The writer must add nothing meanwhile: what the buffers shrink by is what the client has read.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._timer = Timer()

    def start(self, transport: asyncio.Transport) -> None:
        """Does nothing where it is running."""
        if not self._timer.is_running:
            self._timer.start(self._timeout_s, self._check, transport, _num_unread_bytes(transport))

    def cancel(self) -> None:
        self._timer.cancel()

    def _check(self, transport: asyncio.Transport, num_bytes_before: int) -> None:
        if num_bytes_before - _num_unread_bytes(transport) >= _MIN_PROGRESS_BYTES:
            self.start(transport)
            return
        log.warning("disconnected a client that did not read its answer for %g s", self._timeout_s)
        transport.abort()


def _num_unread_bytes(transport: asyncio.Transport) -> int:
    """Returns the bytes in this process and in the kernel that the client's side has not acknowledged."""
    in_kernel = array("i", [0])
    fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_kernel)
    return transport.get_write_buffer_size() + in_kernel[0]


MAX_HEAD_BYTES = 64 * 1024
"""All bytes of one message beside its body: request line, headers, chunk sizes and extensions, trailers."""
MAX_HEADERS = 128
"""Headers and trailers of one message. Browsers and SDKs send 10 to 30, and load balancers add about ten."""
MAX_PIPELINED = 8
"""Requests that may wait on a connection while one is answered. Most clients send none."""
_CHUNK_BYTES_PER_BODY_BYTE = 8
"""Allowance for the framing of small chunks. A chunk of one byte has five bytes around it."""


class RequestFraming:
    """Counts what a client sends around its bodies: heads, chunk sizes and extensions, trailers, empty lines.

    The parser keeps headers and trailers as Python objects, which are many times larger than the bytes that were sent.
    So their number and size are limited, for each message as a whole.

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


HANDSHAKE_S = 5.0
"""Time for a whole TLS handshake, which takes two round trips."""
_TLS_SHUTDOWN_S = 2.0
"""How long a closing connection waits for the client's end of TLS."""


def connection_factory(
    limits: ConnectionLimits, timeout_s: float, tls: ssl.SSLContext | None
) -> Callable[..., asyncio.Protocol]:
    """Returns what makes a connection's protocol, for `uvicorn.Config(http=...)`."""

    def make(**arguments: Any) -> asyncio.Protocol:
        connection = ClientConnection(partial(FramedHttpProtocol, **arguments), limits, timeout_s)
        return TlsAccept(connection, tls) if tls is not None else connection

    return make


class TlsAccept(asyncio.Protocol):
    """Accepts a connection without reading from it, counts it, and hands its socket over to a TLS transport.

    An asyncio server that speaks TLS itself reports a connection only after its handshake. `loop.start_tls` cannot be
    used on a connection just accepted: uvloop may have read from it before.
    """

    def __init__(self, connection: ClientConnection, context: ssl.SSLContext) -> None:
        self._connection = connection
        self._context = context

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        if self._connection.admit(transport) is None:
            try:
                duplicate = transport.get_extra_info("socket").dup()
            except OSError:  # no descriptor is left
                self._connection.connection_lost(None)
            else:
                on_failure = partial(self._connection.connection_lost, None)
                start_job(self._shake_hands(duplicate), "a TLS handshake", on_failure)
        transport.abort()  # closes its own descriptor; the connection lives on where it was duplicated

    async def _shake_hands(self, duplicate: socket.socket) -> None:
        with contextlib.suppress(OSError):  # also ssl.SSLError: the client speaks no TLS, or too slowly
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._connection,
                duplicate,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=_TLS_SHUTDOWN_S,
            )
        if not self._connection.is_open:  # the handshake failed, or the client left during it
            self._connection.connection_lost(None)
