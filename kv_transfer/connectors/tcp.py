"""The `tcp` connector: blocks travel over a socket, with TLS if the cluster has keys. Both sides have CPU pools.

The decode end listens on a free port, which is its address, until the peer has connected. Each transfer has a header,
so that the ends notice when they disagree.

A path has one connection, on one thread. Python reads one TLS record of 16 KiB per call, so several threads of a
process would spend on the GIL what they gain from more cores (figures: docs/adr/0029-tcp-connector.md).

The sender does not use `sendfile`: the kernel would read the pages after the call returned, when the blocks may already
belong to another request.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch

from tandem.kv_transfer.connector import DataNetwork, OnAddress, OnDone, Peer
from tandem.kv_transfer.connectors.addresses import SocketAddress, read_address
from tandem.kv_transfer.connectors.block_messages import BlockMessages, Message
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.protocol.sockets import listen_on_free_port
from tandem.runtime.errors import KVTransferFailed, first_line

CONNECT_TIMEOUT_S = 20.0
PROGRESS_TIMEOUT_S = 5.0
"""Longest time without progress in a transfer; then the peer counts as dead."""
_GREETING_TIMEOUT_S = 2.0
"""Deadline of a new connection's TLS handshake and greeting: a stranger delays the others by no more."""
_PIECE_BYTES = 1 << 20
"""Bytes that one call sends at most."""
_GREETING = struct.Struct("!H")  # bytes of the path id, which follows
_ACCEPTED = b"\1"
_HEADER = struct.Struct("!QQI")  # number of the transfer, bytes of a block, blocks
_SHORTEST_SLICE_S = 0.001


class _Link:
    """One connected socket. `stop` may be called on any thread, and ends a blocked call at once."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext | None, is_server: bool) -> None:
        """Performs the TLS handshake, if there is a context. Takes over `plain`. Raises OSError."""
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * PROGRESS_TIMEOUT_S))
        # A receiver drops strangers that say nothing one after the other; the sender waits meanwhile.
        plain.settimeout(_GREETING_TIMEOUT_S if is_server else PROGRESS_TIMEOUT_S)
        self._duplicate = plain.dup()  # an SSLSocket that is shut down would read on without decrypting
        try:
            self._socket = plain if context is None else context.wrap_socket(plain, server_side=is_server)
        except Exception:
            plain.close()
            self._duplicate.close()
            raise

    def greeted(self) -> None:
        """Replaces the deadline of greetings by that of transfers."""
        self._socket.settimeout(PROGRESS_TIMEOUT_S)

    def send(self, data: memoryview | bytes) -> None:
        """Sends all bytes, in pieces, because the deadline holds for each call."""
        for begin in range(0, len(data), _PIECE_BYTES):
            self._socket.sendall(data[begin : begin + _PIECE_BYTES])

    def receive(self, into: memoryview) -> None:
        """Fills `into`. Raises KVTransferFailed if the peer closes the connection."""
        while into:
            num_bytes = self._socket.recv_into(into)
            if not num_bytes:
                raise KVTransferFailed("the peer closed the connection")
            into = into[num_bytes:]

    def read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self.receive(memoryview(data))
        return bytes(data)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._duplicate.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
        self._duplicate.close()


class _TcpEnd:
    """Common to both ends: the connection and its thread."""

    def __init__(self, name: str, blocks: torch.Tensor, network: DataNetwork) -> None:
        self._messages = BlockMessages("tcp", blocks)  # uint8 [num_blocks, ...]: whole blocks, or some heads of each
        self._block_bytes = blocks[0].numel()
        self._network = network
        self._num_transfers = 0
        self._lock = threading.Lock()  # of the next two
        self._links: list[_Link] = []  # the peer's, and strangers' until they are refused
        self._is_closed = False
        self._link: _Link | None = None
        self._thread = JobThread(name)

    def _connect(self) -> None:
        self._messages.prepare()
        try:
            self._link = self._open_connection(time.monotonic() + CONNECT_TIMEOUT_S)
        except ssl.SSLError as error:
            raise KVTransferFailed(f"the peer has other network keys: {first_line(error)}") from error

    def _open_connection(self, deadline: float) -> _Link:
        raise NotImplementedError

    def _keep(self, link: _Link) -> _Link:
        """Registers a connection to be stopped by `close`."""
        with self._lock:
            self._links.append(link)
            if self._is_closed:
                raise KVTransferFailed("the pair was closed")
        return link

    def _submit(self, move: Callable[[_Link, int, list[int]], None], block_ids: Sequence[int], on_done: OnDone) -> None:
        """move(link, number of the transfer, blocks): called on the thread, unless connecting failed."""
        self._thread.submit(partial(self._move, move, self._num_transfers, list(block_ids)), on_done)
        self._num_transfers += 1

    def _move(self, move: Callable[[_Link, int, list[int]], None], transfer: int, block_ids: list[int]) -> None:
        assert self._link is not None  # a thread whose first job failed runs no other
        move(self._link, transfer, block_ids)

    def close(self, on_closed: Callable[[], None] = lambda: None) -> None:
        with self._lock:
            self._is_closed = True
            links = list(self._links)
        for link in links:
            link.stop()

        def end() -> None:
            for link in self._links:
                link.close()
            on_closed()

        self._thread.close(end)


class TcpSender(_TcpEnd):
    """The prefill end, which connects."""

    def __init__(self, peer: Peer, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> None:
        super().__init__(f"ship-{peer.path_id}", blocks, network)
        self._peer = peer
        self._thread.submit(self._connect, on_ready)

    def _open_connection(self, deadline: float) -> _Link:
        path_id, address = self._peer.path_id.encode(), read_address(self._peer.address, SocketAddress)
        context = self._network.tls.client if self._network.tls is not None else None
        plain = socket.create_connection((address.host, address.port), _time_left(deadline))
        link = self._keep(_Link(plain, context, is_server=False))
        link.send(_GREETING.pack(len(path_id)) + path_id)
        link.greeted()  # the peer may be busy with a stranger
        if link.read(1) != _ACCEPTED:
            raise KVTransferFailed("the peer did not accept the connection")
        return link

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        """Does nothing: the receiver writes."""

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        self._submit(self._send, src_block_ids, on_done)

    def _send(self, link: _Link, transfer: int, block_ids: list[int]) -> None:
        link.send(_HEADER.pack(transfer, self._block_bytes, len(block_ids)))
        for message in self._messages.of(block_ids):
            self._messages.gather(message)
            link.send(_bytes_of(message))


class TcpReceiver(_TcpEnd):
    """The decode end, which listens. It alone writes to its pool, so nothing is written once it is closed."""

    def __init__(self, path_id: str, blocks: torch.Tensor, network: DataNetwork, on_address: OnAddress) -> None:
        """Raises KVTransferFailed if it cannot listen."""
        try:
            fd, port = listen_on_free_port(network.host)
        except OSError as error:
            raise KVTransferFailed(f"cannot listen on {network.host}: {error}") from error
        super().__init__(f"take-{path_id}", blocks, network)
        self._path_id = path_id.encode()
        self._listener = socket.socket(fileno=fd)
        self._thread.submit(self._connect, lambda error: None)
        on_address(msgspec.msgpack.encode(SocketAddress(network.host, port)))

    def _open_connection(self, deadline: float) -> _Link:
        with self._listener as listener:
            return self._accept(listener, deadline)

    def _accept(self, listener: socket.socket, deadline: float) -> _Link:
        """Returns the peer's connection. Others, such as a stranger's, are closed."""
        refused = "nothing connected"
        while True:
            listener.settimeout(_time_left(deadline))
            try:
                plain, _ = listener.accept()
            except TimeoutError:
                raise KVTransferFailed(f"the peer did not connect in {CONNECT_TIMEOUT_S:g} s: {refused}") from None
            try:
                link = self._greet(plain)
            except (OSError, KVTransferFailed) as error:
                refused = first_line(error)
                continue
            link.send(_ACCEPTED)
            link.greeted()
            return link

    def _greet(self, plain: socket.socket) -> _Link:
        """Reads the greeting. Raises KVTransferFailed if it is another path's."""
        context = self._network.tls.server if self._network.tls is not None else None
        link = self._keep(_Link(plain, context, is_server=True))
        (length,) = _GREETING.unpack(link.read(_GREETING.size))
        if length != len(self._path_id) or link.read(length) != self._path_id:
            link.stop()
            raise KVTransferFailed("a connection was not of this path")
        return link

    def close(self, on_closed: Callable[[], None] = lambda: None) -> None:
        with contextlib.suppress(OSError):  # closed, once the peer has connected
            self._listener.shutdown(socket.SHUT_RDWR)

        def end() -> None:
            self._listener.close()
            on_closed()

        super().close(end)

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        self._submit(self._receive, block_ids, on_done)

    def _receive(self, link: _Link, transfer: int, block_ids: list[int]) -> None:
        header, expected = _HEADER.unpack(link.read(_HEADER.size)), (transfer, self._block_bytes, len(block_ids))
        if header != expected:
            raise KVTransferFailed(
                f"the peer sends (transfer, bytes of a block, blocks) {header} instead of {expected}"
            )
        for message in self._messages.of(block_ids):
            link.receive(_bytes_of(message))
            self._messages.scatter(message)


def _bytes_of(message: Message) -> memoryview:
    data: memoryview = message.data.view(-1).numpy().data
    return data


def _time_left(deadline: float) -> float:
    return max(_SHORTEST_SLICE_S, deadline - time.monotonic())


class TcpConnector:
    """Implements `kv_transfer.connector.KVConnector` for CPU pools on any hosts."""

    devices = ("cpu",)
    crosses_hosts = True
    encrypts = True
    one_sided = False

    open_sender = TcpSender
    open_receiver = TcpReceiver


connector = TcpConnector()
